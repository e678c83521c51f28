"""The model as a user gives it: what is refused, and what is read of it.

Each weight version is a parameter of its own. What one process would do with the user's own parameters beyond
that, such as a hook, is refused here, because no comparison of outputs and gradients can see all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten_with_path

from pipetrain.errors import ConfigError
from pipetrain.model.specs import differentiable, name_of
from pipetrain.model.tensor_places import named_tensors, names_by_id
from pipetrain.model.trial_tensors import storage_of


def require_module(model: object, needs: str, dtype: torch.dtype | None) -> None:
    """Refuse a model that cannot train as in one process; cast it to `dtype`, if any. Raises ConfigError."""
    if not isinstance(model, nn.Module) or (isinstance(model, nn.Sequential) and not len(model)):
        what = "an empty nn.Sequential" if isinstance(model, nn.Module) else type(model).__name__
        raise ConfigError(f"{needs} an nn.Module, not {what}")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is a DistributedDataParallel, which adds up gradients by itself: "
                f"give the module in it, its .module, and replicas= adds them up"
            )
    _refuse_parameters(model)
    if dtype is not None:
        _cast(model, dtype)


def _refuse_parameters(model: nn.Module) -> None:
    """Refuse parameters that would be trained otherwise than in one process."""
    addresses: dict[object, str] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            why = f"is a {kind}, and each weight version would be a plain nn.Parameter: make it one"
        elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            why = (
                "has a hook, which would not be called: each weight version has a gradient of its own; put "
                "the hook on the layer's output"
            )
        else:
            address = storage_of(parameter), parameter.storage_offset()
            if (first := addresses.setdefault(address, name)) == name or not parameter.numel():
                continue
            why = f"shares memory with {first}: use one nn.Parameter for both"
        raise ConfigError(f"parameter {name} of the model {why}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no parameter to train: let one require a gradient")
    state_names(model)


def state_names(model: nn.Module) -> dict[str, str]:
    """Return the parameter or buffer behind each state_dict entry. Raises ConfigError for other values."""
    names = names_by_id(model)
    state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if id(value) not in names:
            raise ConfigError(
                f"the model keeps {key} in its state_dict, which is no parameter or buffer and would not be "
                f"in a checkpoint: make it a buffer"
            )
    return {key: names[id(value)] for key, value in state.items()}


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert weights and buffers to the run's dtype (complex ones to its complex form), but never round.

    In place, so that sharing is kept. (nn.Module.to drops imaginary parts and separates shared buffers.)
    """
    for name, tensor in named_tensors(model).items():
        if differentiable(tensor):
            tensor.data = cast_exactly(
                name, tensor.data, dtype.to_complex() if tensor.is_complex() else dtype
            )


def cast_exactly(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a model's tensor as another dtype. Raises ConfigError if that rounds it."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if tensor.is_meta:  # whose numbers are not known yet
        exact = torch.promote_types(tensor.dtype, dtype) == dtype
    else:
        exact = torch.allclose(cast.to(tensor.dtype), tensor, rtol=0, atol=0, equal_nan=True)
    if not exact:
        raise ConfigError(
            f"{name} of the model is {name_of(tensor.dtype)}, and dtype={name_of(dtype)} would round it: "
            f"choose dtype={name_of(tensor.real.dtype)}, or let the factory make it {name_of(dtype)}"
        )
    return cast


def own_dtype(model: object) -> torch.dtype | None:
    """Return the dtype of all floating-point parameters; None if they have several, or less than float32."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    dtypes = {p.dtype for p in parameters if p.is_floating_point()} or {torch.float32}
    return dtypes.pop() if dtypes in ({torch.float32}, {torch.float64}) else None


def tensor_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in attributes, and in collections there, that are no weights or buffers."""
    registered = {id(tensor) for tensor in named_tensors(model).values()}
    return {
        f"{name}.{key}{keystr(path)}".lstrip("."): leaf
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and id(leaf) not in registered
    }
