"""Flat bytes that a caller gives or wants, whatever holds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_core.errors import PageSizeError, PageTypeError

Bytes = npt.NDArray[np.uint8]


def flat_bytes(data: Any, shape: tuple[int, ...], who: str, *, writable: bool = False) -> Bytes:
    """``data`` as uint8 of ``shape`` over the same memory.

    Args:
        data: a numpy array, a CPU tensor or a bytes-like object: contiguous uint8 at any alignment, of
            ``shape`` or with as many bytes in one dimension.
        shape: the shape that is wanted.
        who: who asks, for errors.
        writable: whether it will be written to.

    Raises:
        PageTypeError: it is not such an object, or is read-only where it will be written to.
        PageSizeError: it has another size.
    """
    array = _cpu_array(data, who)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        kind = "contiguous" if array.flags.c_contiguous else "scattered"
        raise _type_error(who, f"{kind} {array.dtype}{list(array.shape)}")
    nbytes = math.prod(shape)
    if array.shape not in (shape, (nbytes,)):
        raise PageSizeError(
            who=who,
            got=f"uint8{list(array.shape)}",
            expected=f"uint8{list(shape)}",
            remedy="Treat a page that was stored with another size as a miss.",
            nbytes=array.size,
            expected_bytes=nbytes,
        )
    if writable and not array.flags.writeable:
        raise _type_error(who, "read-only memory to write pages to")
    return array.reshape(shape)


def _cpu_array(data: Any, who: str) -> npt.NDArray[Any]:
    if isinstance(data, np.ndarray):
        return np.asarray(data)
    if isinstance(data, torch.Tensor):
        if data.device.type != "cpu" or data.layout is not torch.strided or data.dtype is not torch.uint8:
            raise _type_error(who, f"a tensor of {data.dtype} on {data.device}")
        return data.detach().numpy()
    try:
        return np.asarray(memoryview(data))
    except (TypeError, ValueError):
        raise _type_error(who, f"a value of type {type(data).__name__}") from None


def _type_error(who: str, got: str) -> PageTypeError:
    return PageTypeError(
        who=who,
        got=got,
        expected="contiguous uint8 on the CPU: a numpy array, a torch tensor or a bytes-like object",
        remedy="Give the flat bytes, e.g. tensor.cpu().contiguous().view(torch.uint8).",
    )
