"""Typed settings of the stages; each is validated once, when it is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass

SOURCE_SCHEME = "source"  # the row of the unconverted model in every table
CHANNEL = "channel"  # group_size 0 in configuration files and tables: one scale per output channel
SCOPES = ("input", "width")
FOLDS = ("intermediate", "residual", "value")
ORDERS = ("max_abs_weight", "importance", "natural")
WEIGHTS = ("int4", "keep")
EMBEDDINGS = ("int8", "keep")
HEADS = ("auto", "tied", "int4", "keep")
OTF, COMPRESSED_TENSORS = "otf", "compressed-tensors"
EXPORTS = (OTF, COMPRESSED_TENSORS)


def _one_of(key: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class PermutationSettings:
    """How channels are ordered.

    scope: ``input`` (an order per linear input) or ``width`` (one order per distinct input width, for the whole model).
    fold: axes whose order is folded into the weights, of ``residual``, ``intermediate``, ``value``.
    order: how the background is sorted. outlier_fraction: share of input channels kept in FP16, rounded up;
    minimum_outliers: the least number kept where the fraction is not 0.
    """

    scope: str = "input"
    fold: tuple[str, ...] = ("intermediate",)
    order: str = "natural"
    outlier_fraction: float = 0.01
    minimum_outliers: int = 1

    def __post_init__(self):
        object.__setattr__(self, "fold", tuple(sorted(set(self.fold))))
        _one_of("permutation.scope", self.scope, SCOPES)
        _one_of("permutation.order", self.order, ORDERS)
        for axis in self.fold:
            _one_of("permutation.fold", axis, FOLDS)
        if self.scope == "width" and self.fold:
            raise ValueError("permutation.fold: must be empty when permutation.scope is width")
        if not 0 <= self.outlier_fraction <= 1:
            raise ValueError(f"permutation.outlier_fraction: {self.outlier_fraction} is not between 0 and 1")
        if self.minimum_outliers < 0:
            raise ValueError(f"permutation.minimum_outliers: {self.minimum_outliers} is negative")

    def to_dict(self) -> dict:
        """Plain values, JSON-ready."""
        return {**asdict(self), "fold": list(self.fold)}

    @classmethod
    def from_dict(cls, values: dict) -> PermutationSettings:
        """The inverse of ``to_dict``; absent keys take their defaults."""
        return cls(**{**values, "fold": tuple(values.get("fold", cls.fold))})

    @property
    def slug(self) -> str:
        """A file name for these settings, e.g. ``input-intermediate-natural-0.01-1``."""
        fold = "+".join(self.fold) or "none"
        return f"{self.scope}-{fold}-{self.order}-{self.outlier_fraction}-{self.minimum_outliers}"


@dataclass(frozen=True)
class SchemeSettings:
    """How a model is converted.

    weights: ``int4`` or ``keep``. group_size: columns per scale, 0 for one scale per output channel.
    scale_search: importance-weighted search of the scales. embedding: ``int8`` or ``keep``.
    lm_head: ``tied`` (reads the embedding's table), ``int4``, ``keep``, or ``auto``: tied where the source's is, else
    int4 when the weights are (kept otherwise). keep: patterns of linears that stay as in the source, whatever
    ``weights`` says (`otf_llm.decoder.matched_linears`). export: ``otf``, this library's own layout, or
    ``compressed-tensors``, its pack-quantized one, which has no place for FP16 columns, orders or an INT8 embedding.
    """

    weights: str = "int4"
    group_size: int = 64
    scale_search: bool = True
    embedding: str = "int8"
    lm_head: str = "auto"
    keep: tuple[str, ...] = ()
    export: str = OTF
    permutation: PermutationSettings = PermutationSettings()

    def __post_init__(self):
        object.__setattr__(self, "keep", tuple(self.keep))
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("embedding", self.embedding, EMBEDDINGS)
        _one_of("lm_head", self.lm_head, HEADS)
        _one_of("export", self.export, EXPORTS)
        if self.export == COMPRESSED_TENSORS:
            self._check_exportable()
        if self.group_size < 0 or self.group_size % 2:
            raise ValueError(f"group_size: {self.group_size} must be even and positive, or 0 for one scale per channel")

    def _check_exportable(self) -> None:
        needed = {
            "weights": (self.weights, "int4"),
            "embedding": (self.embedding, "keep"),
            "permutation.outlier_fraction": (self.permutation.outlier_fraction, 0),
            "permutation.order": (self.permutation.order, "natural"),
        }
        for key, (value, wanted) in needed.items():
            if value != wanted:
                raise ValueError(f"export: {COMPRESSED_TENSORS} needs {key}: {wanted}, not {value}")
        if self.lm_head == "int4":
            raise ValueError(f"export: {COMPRESSED_TENSORS} needs lm_head: auto, tied or keep, not int4")

    @property
    def needs_calibration(self) -> bool:
        """Whether converting reads calibration statistics and a permutation."""
        return self.weights == "int4" or self.lm_head == "int4"

    def to_dict(self) -> dict:
        """Plain values, JSON-ready."""
        return {**asdict(self), "keep": list(self.keep), "permutation": self.permutation.to_dict()}

    @classmethod
    def from_dict(cls, values: dict) -> SchemeSettings:
        """The inverse of ``to_dict``; absent keys take their defaults."""
        permutation = PermutationSettings.from_dict(values.get("permutation", {}))
        return cls(**{**values, "permutation": permutation})

    def head_for(self, tied: bool) -> str:
        """What becomes of the head of a model whose embeddings are ``tied``: ``tied``, ``int4`` or ``keep``.

        Raises ValueError when the setting asks to tie a head that is not tied in the source.
        """
        if self.lm_head == "tied" and not tied:
            raise ValueError("lm_head: tied, but the source model's head is not tied to its embedding")
        if tied and self.lm_head == "keep" and self.embedding == "keep":
            return "tied"  # both keep the one matrix that they share
        if self.lm_head != "auto":
            return self.lm_head
        return "tied" if tied else ("int4" if self.weights == "int4" and self.export == OTF else "keep")
