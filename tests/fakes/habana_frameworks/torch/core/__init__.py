from habana_frameworks.torch import _accelerator
from habana_frameworks.torch.utils.internal import is_lazy


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Lazy mode compiles and runs what it gathered; without effect in the other."""
    if is_lazy():
        _accelerator.accelerator().mark_step()
