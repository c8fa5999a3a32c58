"""otf_llm: the library of otf-llm-pipeline.

Importing it makes converted folders loadable by ``transformers.AutoModelForCausalLM.from_pretrained``. The quantizer is
registered when transformers' own registry is first imported, so stages that need no transformers stay small and fast.
"""

import wrapt

__version__ = "0.1.0"


@wrapt.when_imported("transformers.quantizers.auto")
def _register_quantizer(_registry):
    import otf_llm.registration  # noqa: F401  (importing it registers the "otf" quantizer)
