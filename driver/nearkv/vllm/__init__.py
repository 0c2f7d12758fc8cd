"""vLLM on the device: an attention backend whose KV cache lives there, and a tier that keeps blocks there.

    pip install 'nearkv[vllm]'
    NEARKV_VLLM=model vllm serve path/to/model

vLLM finds `register` by its entry point, in every process that it starts; without NEARKV_VLLM it does
nothing. Nothing here is imported from vLLM before that.
"""

from __future__ import annotations

from .settings import Settings


def register() -> None:
    """Put nearkv's attention backend in the place of vLLM's CPU backend, if NEARKV_VLLM says so.

    Raises
    ------
    ValueError : for settings that are none.
    """
    if Settings.from_environment() is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # the CPU platform asks for this one whatever is selected
    register_backend(AttentionBackendEnum.CPU_ATTN, "nearkv.vllm.backend.NearKVBackend")


__all__ = ["Settings", "register"]
