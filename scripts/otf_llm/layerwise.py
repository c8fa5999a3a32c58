"""Runs a decoder one layer at a time from disk, so that memory holds one layer and the token states.

The model is transformers' own, built without weights. Its own forward prepares masks, positions and rotary embeddings
(recorder modules stand in for the decoder layers and note the arguments that each would get); then every layer is
loaded, applied to all batches, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from otf_llm.checkpoint import Checkpoint
from otf_llm.experts import split_experts
from otf_llm.families import Family
from otf_llm.memory import return_freed_memory

EMBEDDING_BLOCK_BYTES = 64 << 20


@dataclass
class Batch:
    """Token states of some sequences: hidden float [B, T, H], real bool [B, T] (False on padding), layer arguments."""

    hidden: torch.Tensor
    real: torch.Tensor
    arguments: list[dict]


class _Recorder(nn.Module):
    """Stands in for a decoder layer: notes its keyword arguments and passes the states on."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.arguments: dict = {}

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: torch.Tensor, **arguments) -> torch.Tensor:
        self.arguments = arguments
        return hidden_states


class LayerwiseModel:
    """A causal language model whose weights are read from a checkpoint when they are needed.

    Args:
        checkpoint: an open Hugging Face checkpoint.
        family: its family.
        dtype: dtype of weights and states; float32 holds whatever a BF16 model computes.
        device: where a layer runs.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, dtype=torch.float32, device="cpu"):
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint, self.family, self.dtype, self.device = checkpoint, family, dtype, torch.device(device)
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder).get_text_config(decoder=True)
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:  # whatever transformers raises for a value that it cannot use
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{checkpoint.folder}/config.json: transformers makes no model of it: {told}") from error
        split_experts(model)
        self.model = model.eval().requires_grad_(False)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):  # rotary frequencies; the weights are still absent
                setattr(module, name, buffer.to(self.device))
        self.decoder = self.model.get_submodule(family.layers.rpartition(".")[0])
        self.layers = self.model.get_submodule(family.layers)

    def prepare(self, sequences: list[torch.Tensor], batch_size: int, padding_side: str = "right") -> list[Batch]:
        """Embed the sequences (int [T_i] each) in padded batches; attention masks and positions follow the padding."""
        embedding = self._embedding(sequences)
        batches = []
        for start in range(0, len(sequences), batch_size):
            ids, real = _pad(sequences[start : start + batch_size], padding_side)
            batches.append(self._record(embedding(ids.to(self.device)), real.to(self.device)))
        return batches

    def run(self, batches: list[Batch], watch: Callable[[int, nn.Module, Batch], Iterator] | None = None) -> None:
        """Advance every batch through all decoder layers and the final norm, in place.

        ``watch(layer_index, layer, batch)`` may return a context manager, open while the layer runs on the batch.

        Raises ValueError naming the layer whose output is not finite.
        """
        tokens = sum(int(batch.real.sum()) for batch in batches)
        with tqdm(total=tokens * len(self.layers), unit="tok·layer", unit_scale=True, desc="decoder layers") as bar:
            for index, layer in enumerate(self.layers):
                self._load(layer, f"{self.family.layers}.{index}")
                for batch in batches:
                    context = watch(index, layer, batch) if watch else torch.no_grad()
                    with torch.no_grad(), context:
                        output = layer(batch.hidden, **batch.arguments[index])
                    batch.hidden = output[0] if isinstance(output, tuple) else output
                    self._check_finite(batch, index)
                    bar.update(int(batch.real.sum()))
                layer.to("meta")
                return_freed_memory()
        norm = self.model.get_submodule(self.family.final_norm)
        self._load(norm, self.family.final_norm)
        for batch in batches:
            with torch.no_grad():
                batch.hidden = norm(batch.hidden)

    def _check_finite(self, batch: Batch, index: int) -> None:
        states = batch.hidden[batch.real]
        if not torch.isfinite(states).all():
            finite = states[torch.isfinite(states)]
            largest = finite.abs().max().item() if finite.numel() else 0.0
            raise ValueError(
                f"{self.family.layers}.{index} gives {states.numel() - finite.numel()} values that are NaN or Inf in "
                f"{self.dtype}; largest finite magnitude {largest:.4g}"
            )

    def _load(self, module: nn.Module, prefix: str) -> None:
        state = {
            name: self.checkpoint.read_as(f"{prefix}.{name}", self.dtype, self.device)
            for name, _ in module.named_parameters()
        }
        module.load_state_dict(state, strict=True, assign=True)
        module.to(self.device)

    def _record(self, embedded: torch.Tensor, real: torch.Tensor) -> Batch:
        positions = (real.long().cumsum(-1) - 1).clamp_min(0)
        recorders = nn.ModuleList([_Recorder(layer) for layer in self.layers])
        name = self.family.layers.rpartition(".")[2]
        setattr(self.decoder, name, recorders)
        norm_name = self.family.final_norm.rpartition(".")[2]
        norm = getattr(self.decoder, norm_name)
        setattr(self.decoder, norm_name, nn.Identity())
        try:
            with torch.no_grad():
                mask = None if real.all() else real.long()
                self.decoder(inputs_embeds=embedded, attention_mask=mask, position_ids=positions, use_cache=False)
        finally:
            setattr(self.decoder, name, self.layers)
            setattr(self.decoder, norm_name, norm)
        return Batch(embedded, real, [recorder.arguments for recorder in recorders])

    def _embedding(self, sequences: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model's own embedding module (with its scaling, if any) over just the rows that the tokens use."""
        used = torch.unique(torch.cat(sequences)).long()
        name = f"{self.family.embedding}.weight"
        vocab, hidden = self.checkpoint.tensors[name].shape
        outside = used[(used < 0) | (used >= vocab)]
        if len(outside):
            raise ValueError(f"token id {int(outside[0])} is outside the embedding's {vocab} rows")
        table = torch.empty(len(used), hidden, dtype=self.dtype)
        block = max(1, EMBEDDING_BLOCK_BYTES // (4 * hidden))
        for start in range(0, vocab, block):
            inside = (used >= start) & (used < start + block)
            if inside.any():
                rows = self.checkpoint.read_rows(name, start, min(start + block, vocab))
                table[inside] = rows[used[inside] - start].to(self.dtype)
        module = self.model.get_input_embeddings()
        module.weight = nn.Parameter(table.to(self.device), requires_grad=False)
        module.padding_idx = None
        module.to(self.device)
        position = torch.zeros(vocab, dtype=torch.long, device=self.device)
        position[used.to(self.device)] = torch.arange(len(used), device=self.device)
        return lambda ids: module(position[ids])


def _pad(sequences: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [B, T] padded with an id in use, and real bool [B, T]; the mask is explicit, so any pad id serves."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), longest), int(sequences[0][0]))
    real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(longest - len(sequence), None) if side == "left" else slice(0, len(sequence))
        ids[row, place], real[row, place] = sequence.long(), True
    return ids, real
