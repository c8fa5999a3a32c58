"""Calibration and evaluation text: documents from files or the hub."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from otf_llm.sources import add_sample

_log = logging.getLogger(__name__)

# The `datasets` builder that reads each kind of file.
_BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".txt.gz": "text",
    ".md.gz": "text",
    ".jsonl.gz": "json",
    ".parquet": "parquet",
}
WHOLE_TEXT_BYTES = 1 << 26  # texts below are fingerprinted by all their bytes
_SUPPORTED = ", ".join(_BUILDERS)
_GZIP_MAGIC = b"\x1f\x8b"
_WIDE_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32 LE starts like UTF-16 LE
# First character of every text in the cleaned copies, taken off after loading. Without it `datasets` takes a file that
# starts with "BZh" for bzip2, and pyarrow turns JSON strings that all look like dates into dates.
_GUARD = "|"


def load_texts(paths: Sequence[Path], *, column: str = "text", errors: str = "strict") -> list[str]:
    """Documents of files and folders, in the order of `paths`; a folder's files recursively, sorted by relative path.

    `.txt` and `.md` give one document per file, `.jsonl` and `.parquet` one per row (their string column `column`);
    `.txt.gz`, `.md.gz` and `.jsonl.gz` are decompressed. Text is UTF-8: a byte order mark is dropped, line ends of text
    files become "\\n". With `errors="replace"` bytes that are not UTF-8 become U+FFFD, all others are kept and the
    number of replaced bytes is logged (Parquet always stores UTF-8, so a bad Parquet string stays an error). Files
    without text are skipped, and files of other kinds in a folder ignored, each with a logged note; so the list can be
    empty. Files are read through `datasets` with a temporary cache; nothing is written elsewhere.

    Raises ValueError naming the file, and where it applies the byte offset, line or row: missing path, folder without
    text files, unsupported kind, gzip or UTF-16 under another name, damaged gzip or Parquet, bytes that are not UTF-8,
    a line that is not exactly one JSON object, a missing column (all columns are listed), a value that is no string.
    """
    if errors not in ("strict", "replace"):
        raise ValueError(f'errors must be "strict" or "replace", got {errors!r}')
    files = [file for path in paths for file in list_files(Path(path))]
    texts = []
    with tempfile.TemporaryDirectory(prefix="otf-text-") as scratch:
        for builder, group in itertools.groupby(enumerate(files), key=lambda numbered: _builder(numbered[1])):
            copies = []
            for number, file in group:
                copy = Path(scratch, f"{number:08d}.{builder}")
                if _write_checked_copy(file, builder, column, errors, copy):
                    copies.append(str(copy))
                else:
                    _log.warning("%s holds no text and is skipped", file)
            if copies:
                texts += _load_copies(builder, copies, column, scratch)
    return texts


def load_hub_dataset(
    name: str, *, config: str | None = None, split: str = "train", revision: str | None = None, column: str = "text"
) -> list[str]:
    """Texts of `column` in one split of a dataset on the Hugging Face hub, one per row, at exactly one commit.

    `revision` (branch, tag or commit; None: the default branch) is resolved to a commit first, which is logged. Nothing
    ever stands in for it: neither an older cached copy nor a local folder of that name.

    Raises OSError at once if HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set or the hub cannot be reached; ValueError if
    the dataset, revision, configuration, split or column does not exist, or a value is no string.
    """
    commit = hub_dataset_commit(name, revision)
    _log.info("dataset %s: commit %s", name, commit)
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    with tempfile.TemporaryDirectory(prefix="otf-hub-") as cache:
        # The empty cache leaves `datasets` no older copy to fall back on; the hf:// prefix keeps it from local folders.
        try:
            dataset = load_dataset(f"hf://datasets/{name}", config, split=split, revision=commit, cache_dir=cache)
        except (DatasetsError, ValueError) as error:
            raise ValueError(f"dataset {name}, configuration {config}, split {split}: {error}") from error
        if column not in dataset.column_names:
            raise ValueError(
                f"dataset {name} has no column {column!r}; its columns are {', '.join(dataset.column_names)}"
            )
        texts = list(dataset[column])
    for row, text in enumerate(texts):
        _require_string(text, f"dataset {name} row {row} column {column!r}")
    return texts


def hub_origin(text: Mapping) -> str | None:
    """What of the hub a text is (fields of ``config.TextSource``), as one string; None for any other text."""
    fields = ("dataset", "config", "split", "revision", "column")
    return " ".join(str(text[field]) for field in fields) if text["dataset"] else None


def hub_dataset_commit(name: str, revision: str | None = None) -> str:
    """The commit that `revision` of a dataset on the hub stands for: one request, nothing downloaded.

    Raises what `load_hub_dataset` does for a dataset or revision that cannot be had.
    """
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise OSError(f"cannot load the dataset {name} from the hub: {variable} is set (use text files instead)")
    from huggingface_hub import HfApi

    # HTTPError is the base class of the hub's HTTP library, which differs between its versions.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=10).sha
    except HFValidationError as error:
        raise ValueError(f"{name!r} is no name of a dataset on the hub: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            where = f" at revision {revision}" if revision else ""
            raise ValueError(f"the hub has no dataset {name}{where} that can be read (HTTP {status})") from error
        raise OSError(f"cannot load the dataset {name}: the hub answers HTTP {status}") from error
    except (HTTPError, OSError) as error:
        raise OSError(f"cannot load the dataset {name}: the hub cannot be reached ({error})") from error


def _builder(path: Path) -> str | None:
    """The `datasets` builder for a file, by its name; None if it is of no supported kind."""
    name = path.name.lower()
    return next((builder for suffix, builder in _BUILDERS.items() if name.endswith(suffix)), None)


def fingerprint_texts(paths: Sequence[str | Path]) -> str:
    """16 hex digits for the text files at ``paths`` (see `list_files`): names and content, sampled above 64 MiB.

    Raises ValueError where a path holds no text.
    """
    digest = hashlib.sha256()
    for path in map(Path, paths):
        for file in list_files(path):
            digest.update(f"\0{file.relative_to(path) if file != path else file.name}\0".encode())
            add_sample(digest, file, WHOLE_TEXT_BYTES)
    return digest.hexdigest()[:16]


def list_files(path: Path) -> list[Path]:
    """The text files that ``path`` stands for: itself, or those of supported kinds below it, hidden ones left out.

    Raises ValueError where there is none.
    """
    if not path.exists():
        raise ValueError(f"text file or folder {path} does not exist")
    if not path.is_dir():
        if _builder(path) is None:
            raise ValueError(f"{path} is of no supported kind ({_SUPPORTED})")
        return [path]
    below = [(file.relative_to(path), file) for file in path.rglob("*") if file.is_file()]
    visible = [(name, file) for name, file in below if not any(part.startswith(".") for part in name.parts)]
    found = [file for name, file in sorted(visible, key=lambda pair: pair[0].as_posix())]
    for file in found:
        if _builder(file) is None:
            _log.info("%s is ignored: its kind is not one of %s", file, _SUPPORTED)
    usable = [file for file in found if _builder(file) is not None]
    if not usable:
        raise ValueError(f"folder {path} holds no text files ({_SUPPORTED}) among its {len(found)} files")
    return usable


def _write_checked_copy(file: Path, builder: str, column: str, errors: str, copy: Path) -> bool:
    """Check one file and write what `datasets` shall read to `copy`; False, and no copy, if it holds no text."""
    if file.stat().st_size == 0:
        return False
    if builder == "parquet":
        copy.symlink_to(file.resolve())  # a plain name: `datasets` takes brackets and stars in paths for patterns
        return _check_parquet(file, column) > 0
    text = _decode(file, errors)
    if builder == "text":
        content = _GUARD + text
    else:
        rows = _json_rows(file, text, column)
        content = "".join(json.dumps({"text": _GUARD + row}) + "\n" for row in rows)
        text = content
    copy.write_text(content, encoding="utf-8", newline="")
    return text != ""


def _decode(file: Path, errors: str) -> str:
    """A text file's content as `load_texts` promises it, but for line ends."""
    data = file.read_bytes()
    if file.suffix.lower() == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file} is not a whole gzip file: {error}") from error
    elif data.startswith(_GZIP_MAGIC):
        raise ValueError(f"{file} is gzip, not plain text: decompress it or name it {file.name}.gz")
    if data.startswith(_WIDE_BOMS):
        raise ValueError(f"{file} starts with a UTF-16 or UTF-32 byte order mark: save it as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "strict":
            where = f"byte {error.start}" + (" of the decompressed text" if file.suffix.lower() == ".gz" else "")
            raise ValueError(f"{file} is not UTF-8 at {where} (0x{data[error.start]:02x}): {error.reason}") from error
        text = data.decode("utf-8", "replace")
        inserted = text.count("\ufffd") - data.count("\ufffd".encode())  # the file may hold U+FFFD of its own
        kept = len(text.encode()) - inserted * len("\ufffd".encode())
        _log.warning("%s: %d bytes that are not UTF-8 were replaced", file, len(data) - kept)
    return text.removeprefix("\ufeff")


def _json_rows(file: Path, text: str, column: str) -> list[str]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 is no line end in JSON
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problem = "holds more than one JSON value" if error.msg == "Extra data" else f"is not JSON ({error.msg})"
            raise ValueError(f"{where} {problem}, at character {error.pos + 1}: need one object per line") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
            raise ValueError(f"{where} is not readable JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds a {type(row).__name__}: need one object per line")
        if column not in row:
            raise ValueError(f"{where} has no column {column!r}; its columns are {', '.join(row) or 'none'}")
        rows.append(_require_string(row[column], f"{where} column {column!r}"))
    return rows


def _check_parquet(file: Path, column: str) -> int:
    """Number of rows of a Parquet file whose column is all valid strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(file, "rb") as opened:
        if opened.read(2) == _GZIP_MAGIC:
            raise ValueError(f"{file} is gzip, not Parquet: decompress it")
    row = 0
    try:
        with pq.ParquetFile(file) as opened:
            columns = opened.schema_arrow.names
            if column not in columns:
                raise ValueError(f"{file} has no column {column!r}; its columns are {', '.join(columns)}")
            for batch in opened.iter_batches(columns=[column], batch_size=1024):
                batch.validate(full=True)
                for text in batch.column(0).to_pylist():
                    _require_string(text, f"{file} row {row} column {column!r}")
                    row += 1
    except pa.ArrowException as error:
        raise ValueError(f"{file} is damaged or not Parquet (from row {row}): {error}") from error
    return row


def _require_string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{where} is not text at character {error.start + 1}: {error.reason}") from error
    return value


def _load_copies(builder: str, copies: list[str], column: str, cache: str) -> list[str]:
    from datasets import load_dataset

    options = {"text": {"sample_by": "document"}, "json": {}, "parquet": {"columns": [column]}}[builder]
    dataset = load_dataset(builder, data_files=copies, split="train", cache_dir=cache, **options)
    if builder == "parquet":
        return list(dataset[column])
    return [text.removeprefix(_GUARD) for text in dataset["text"]]
