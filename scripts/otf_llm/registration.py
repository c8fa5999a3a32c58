"""Registers the ``otf`` quantization method with transformers. The modules behind it are imported on first use."""

from __future__ import annotations

import logging
import re

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from otf_llm.artifact_format import FORMAT_VERSION, PERMUTATION_TABLE, QUANT_METHOD
from otf_llm.decoder import Geometry, fused_experts, read_config, tensor_role
from otf_llm.families import Family, Kind

logger = logging.getLogger(__name__)


@register_quantization_config(QUANT_METHOD)
class OtfConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a converted folder's ``config.json``.

    format_version: layout of the artifact. scheme: the settings that it was converted with. embedding: ``int8`` or
    ``keep``. lm_head: ``tied``, ``int4`` or ``keep``. group_size: columns per scale, 0 for one per output channel.
    linears: per INT4 module ``[in_features, num_outliers, offset]``, the offset of its order in
    global_perm_idx, or null when the order is folded.
    bf16_outliers: modules whose outlier columns exceed FP16 and are BF16.
    carried: tensors that lie beside the model's own and belong to none of its modules.
    permutation_length: entries of ``global_perm_idx``; permutation_dtype: ``int16`` or ``int32``.

    Raises ValueError for a format version that this library does not know, and for two group sizes.
    """

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        scheme: dict | None = None,
        embedding: str = "keep",
        lm_head: str = "keep",
        group_size: int = 0,
        linears: dict | None = None,
        bf16_outliers: list | None = None,
        carried: list | None = None,
        permutation_length: int = 0,
        permutation_dtype: str = "int16",
        **kwargs,
    ):
        if format_version != FORMAT_VERSION:
            raise ValueError(
                f"this artifact has format version {format_version}, this otf_llm reads version {FORMAT_VERSION}"
            )
        if scheme and scheme.get("group_size", group_size) != group_size:
            raise ValueError(f"group_size is {group_size}, but the scheme's is {scheme['group_size']}")
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        self.scheme = scheme or {}
        self.embedding = embedding
        self.lm_head = lm_head
        self.group_size = group_size
        self.linears = linears or {}
        self.bf16_outliers = bf16_outliers or []
        self.carried = carried or []
        self.permutation_length = permutation_length
        self.permutation_dtype = permutation_dtype


@register_quantizer(QUANT_METHOD)
class OtfQuantizer(HfQuantizer):
    """Swaps a transformers model's linears and embedding for packed ones before its weights are loaded."""

    requires_calibration = True

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, *args, **kwargs) -> bool:
        logger.warning("a converted folder is the saved form of a packed model: copy the folder")
        return False

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        from otf_llm.modules import expected_tensors, install_modules

        install_modules(model, self.quantization_config)
        if checkpoint_files:
            family, geometry = read_config(model.config.to_dict())
            carried = self.quantization_config.carried
            _check_stored(checkpoint_files, family, geometry, expected_tensors(model), carried)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        from otf_llm.modules import bind_permutation

        bind_permutation(model, self.quantization_config)
        _cast_parameters(model, model.config.dtype)
        return model


def _cast_parameters(model, dtype) -> None:
    """Give parameters, which are what is not packed, the dtype that was asked for.

    transformers 5.17 keeps the stored dtype of every tensor that it renames, as it does for a bare decoder.
    """
    plan = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        wanted = next((kept for pattern, kept in plan.items() if re.search(pattern, name)), dtype)
        parameter.data = parameter.data.to(wanted)


def _check_stored(files: list[str], family: Family, geometry: Geometry, expected: set[str], carried: list[str]) -> None:
    """Compare what the files hold with what the model needs.

    Raises ValueError naming tensors that no file holds, which transformers would initialise at random, or that belong
    to nothing, which it would pass over.
    """
    from safetensors import SafetensorError, safe_open

    stored: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                stored |= set(map(family.module_name, file.keys()))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    prefix = f"{family.layers.partition('.')[0]}."
    if not any(name.startswith(prefix) for name in expected):  # a bare decoder, which has no use for the head
        expected = {name if name == PERMUTATION_TABLE else prefix + name for name in expected}
        stored = {name for name in stored if not name.startswith(f"{family.head}.")}
    for name in [name for name in expected if tensor_role(family, name).kind is Kind.EXPERTS and name not in stored]:
        # Experts that stay dense are stored one by one; transformers gathers them in one parameter.
        expected = expected - {name} | set(fused_experts(family, geometry, name)[0])
    missing = sorted(expected - stored)
    if missing:
        raise ValueError(f"the artifact lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    # Rotary frequencies, which some checkpoints store, are computed anew.
    strange = sorted(
        name for name in stored - expected - set(carried) if tensor_role(family, name).kind is not Kind.BUFFER
    )
    if strange:
        raise ValueError(f"the artifact holds {len(strange)} tensors of no module: {', '.join(strange[:5])}")
