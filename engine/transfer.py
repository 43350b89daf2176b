"""Host arrays to a device without waiting for it."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device in order of its stream, without waiting for what runs on it.

    Through pinned memory where the device is a GPU: from other memory the copy would wait. On a
    CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
