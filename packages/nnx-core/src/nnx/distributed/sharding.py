"""A network whose parameters are sharded over the processes of a fit, and back again.

FSDP2 changes a module in place: parameters become ``DTensor`` shards, classes get
FSDP ancestors, hooks gather the parameters of a block around its forward. A
:class:`ShardedNet` notes what it changed. :meth:`ShardedNet.restore` undoes all of it,
so that the caller's module is again the one it was, with the trained weights.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nnx.distributed.group import Group
from nnx.distributed.process import mesh_of

_NEEDED = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks",
    "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def check_torch() -> None:
    """Refuse a torch without the parts of FSDP2 that are used here."""
    import torch.distributed.fsdp as fsdp

    module = getattr(fsdp, "FSDPModule", None)
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"distributed=FSDP() needs fully_shard with {', '.join(missing)}, which torch "
            f"{torch.__version__} does not have; install a newer torch, or use distributed=DDP()"
        )


@dataclass(slots=True)
class _Slot:
    """One parameter at one place of the network, whole and sharded."""

    module: nn.Module
    name: str
    whole: nn.Parameter
    shard: Any = None


class ShardedNet:
    """``net`` with its parameters sharded by ``fully_shard``, in blocks."""

    def __init__(
        self,
        net: nn.Module,
        group: Group,
        patterns: Sequence[str] | None = None,
        *,
        unused: bool = False,
    ) -> None:
        self.net = net
        self._group = group
        self._released = False
        self._slots = [
            _Slot(module, name, parameter)
            for module in net.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._before = [_Before(module) for module in net.modules()]
        self._handles: list[Any] = []
        _check_parameters(net)
        blocks = blocks_of(net, patterns)
        self.mesh = mesh_of(self._slots[0].whole.device.type)
        try:
            self._shard(blocks, unused)
        except BaseException:
            self._note_changes()
            self._put_back()
            raise
        self._note_changes()
        for slot in self._slots:
            slot.shard = slot.module._parameters[slot.name]
        self._follow(blocks)

    def _note_changes(self) -> None:
        for before in self._before:
            before.note_changes()

    def _shard(self, blocks: Sequence[nn.Module], unused: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in (*blocks, self.net):
            # Always resharded after a forward, so that what the network holds between
            # two calls are the parameters that the optimizers own.
            fully_shard(block, mesh=self.mesh, reshard_after_forward=True)
        for block in self._blocks():
            block.set_gradient_divide_factor(1.0)  # the engine divides, by valid samples
            block.set_force_sum_reduction_for_comms(True)  # gloo can do nothing else
            if unused and hasattr(block, "set_reduce_scatter_unused_params"):
                block.set_reduce_scatter_unused_params(True, recurse=False)

    def _blocks(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.net.modules() if isinstance(module, FSDPModule)]

    # -- weights --------------------------------------------------------------

    def take_writers_weights(self) -> None:
        """Every shard becomes the one of the writer's weights, and whole copies are freed."""
        whole = {id(slot.whole): slot.whole.data for slot in self._slots}
        self._group.broadcast([*whole.values(), *self.net.buffers()])
        for slot in self._slots:
            local = slot.shard.to_local()
            with torch.no_grad():
                local.copy_(_part_of(slot.whole.data, self._group).to(local.device))
        for slot in self._slots:
            slot.whole.data = slot.whole.data.new_empty(0)
        self._released = True

    def part_of(self, whole: torch.Tensor) -> Any:
        """This process's shard of a tensor that it holds whole."""
        from torch.distributed.tensor import DTensor, Shard

        local = _part_of(whole.detach(), self._group).clone()
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def restore(self, *, together: bool) -> None:
        """Make the module an ordinary one again.

        Its weights are gathered from all processes; where nothing was released yet,
        the module's own are put back. ``together`` says that the other processes can
        be counted on; without them a released module stays as it is.
        """
        if self._released and not together:
            return
        if self._released:
            self._gather()
        self._put_back()

    def _gather(self) -> None:
        done: set[int] = set()
        for slot in self._slots:
            if id(slot.whole) in done:
                continue
            done.add(id(slot.whole))
            slot.whole.data = _whole_of(slot.shard, self._group)
            slot.whole.requires_grad_(slot.shard.requires_grad)
            slot.whole.grad = None

    def _put_back(self) -> None:
        for handle in self._handles:
            handle.remove()
        for before in self._before:
            before.put_back()
        for slot in self._slots:
            slot.module._parameters[slot.name] = slot.whole

    # -- forwards -------------------------------------------------------------

    def before_forward(self, call: Callable[[], None]) -> None:
        """Have ``call`` run before each forward of the whole network."""
        hook = self.net.register_forward_pre_hook(lambda *_: call(), prepend=True)
        self._handles.append(hook)

    def after_forward(self, call: Callable[[Any], None]) -> None:
        """Have ``call`` see the outputs of each forward of the whole network."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            call(output)

        self._handles.append(self.net.register_forward_hook(hook))

    def _follow(self, blocks: Sequence[nn.Module]) -> None:
        """Note the blocks of a forward, in order: each gathers its parameters."""
        self._inside = self._gathering = False
        self._run: list[Any] = []
        self._order: list[Any] = [m for m in self.net.modules() if m in set(blocks)]

        def begin(*_: Any) -> None:
            self._inside, self._run = True, []

        def end(*_: Any) -> None:
            self._inside, self._order = False, self._run

        def before(*_: Any) -> None:
            self._gathering = True

        def after(block: nn.Module, _: Any) -> None:
            self._gathering = False
            self._run.append(block)

        self._handles.append(self.net.register_forward_pre_hook(begin))
        self._handles.append(self.net.register_forward_hook(end))
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(before, prepend=True))
            self._handles.append(block.register_forward_pre_hook(after))

    def finish_forward(self) -> None:
        """Gather with the other processes what a forward that failed here has left.

        They are in the same forward and wait for this process. The order is that of the
        forward before, at first that in which the blocks are defined.
        """
        if self._inside and not self._gathering:  # else it is a process that was lost
            self._inside = False
            for block in self._order[len(self._run) :]:
                block.unshard()
                block.reshard()

    def synchronize_gradients(self, flag: bool) -> None:
        """Whether the next backward sums the gradients over the processes, or keeps its own."""
        self.net.set_requires_gradient_sync(flag)  # type: ignore[operator]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole, so that each process may run the network as it likes."""
        blocks = self._blocks()
        try:
            for block in blocks:
                block.set_reshard_after_forward(False, recurse=False)
                block.unshard()
            yield
        finally:
            for block in blocks:
                block.set_reshard_after_forward(True, recurse=False)
                block.reshard()


def _check_parameters(net: nn.Module) -> None:
    """Refuse by name what cannot be sharded, before anything is changed."""
    named = list(net.named_parameters())
    if not named:
        raise ValueError("distributed=FSDP(): the network has no parameters to shard")
    for name, parameter in named:
        problem = None
        if parameter.dim() == 0:
            problem = "it is a scalar; give it one dimension"
        elif parameter.numel() == 0:
            problem = "it is empty; register it as a buffer"
        elif not parameter.is_contiguous():
            problem = "it is not contiguous; make it a Parameter of its .contiguous()"
        if problem is not None:
            raise ValueError(
                f"distributed=FSDP() cannot shard the parameter {name}: {problem}, or use "
                "distributed=DDP()"
            )


class _Before:
    """What a module was before it was sharded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kind = type(module)
        self._attributes = set(vars(module))
        self._hooks = {name: set(vars(module).get(name, ())) for name in _HOOKS}

    def note_changes(self) -> None:
        """What sharding has added; whatever comes later is somebody else's."""
        self._attributes = set(vars(self._module)) - self._attributes
        self._hooks = {
            name: set(vars(self._module).get(name, ())) - known
            for name, known in self._hooks.items()
        }

    def put_back(self) -> None:
        module = self._module
        for name, added in self._hooks.items():
            hooks = vars(module).get(name, {})
            # Some are added in the first forward.
            late = [key for key, hook in hooks.items() if _is_torchs(hook)]
            for key in (*added, *late):
                hooks.pop(key, None)
        for name in self._attributes:
            vars(module).pop(name, None)
        module.__class__ = self._kind
        _forget(module)


def _is_torchs(hook: Any) -> bool:
    """Whether FSDP2 has made a hook."""
    maker = getattr(getattr(hook, "hook", hook), "__module__", None) or ""
    return maker.startswith("torch.distributed.fsdp.")


def _forget(module: nn.Module) -> None:
    """Let ``module`` be sharded again: torch notes elsewhere too that it was."""
    from torch.distributed import _composable_state

    noted = getattr(_composable_state, "_module_state_mapping", None)
    if noted is not None:
        noted.pop(module, None)


def blocks_of(net: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """The submodules to gather as one, innermost first.

    ``ValueError`` for a pattern that matches nothing. A block that shares a parameter
    with the rest of the network is left to the whole.
    """
    named = {name: module for name, module in net.named_modules() if name}
    if patterns is None:
        names = _repeated(net, "")
    else:
        for pattern in patterns:
            if not fnmatch.filter(named, pattern):
                raise ValueError(
                    f"FSDP(blocks=...): {pattern!r} matches no submodule of the network "
                    f"(it has {', '.join(list(named)[:10]) or 'none'}, ...)"
                )
        names = [n for n in named if any(fnmatch.fnmatch(n, p) for p in patterns)]
    found = [named[name] for name in names if _is_block(net, named[name])]
    return list(dict.fromkeys(reversed(found)))


def _repeated(module: nn.Module, prefix: str) -> list[str]:
    """Names of the members of the outermost lists and sequences under ``module``."""
    names = []
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if type(module) in (nn.ModuleList, nn.Sequential):
            names.append(full)
        else:
            names += _repeated(child, f"{full}.")
    return names


def _is_block(net: nn.Module, block: nn.Module) -> bool:
    if type(block).forward is nn.Module.forward:  # a container, never called itself
        return False
    own = {id(parameter) for parameter in block.parameters()}
    inside = set(block.modules())
    outside = (p for m in net.modules() if m not in inside for p in m.parameters(recurse=False))
    return bool(own) and not any(id(parameter) in own for parameter in outside)


def _part_of(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of ``whole`` that this process keeps."""
    size = -(-whole.shape[0] // group.world_size)
    start = min(group.rank * size, whole.shape[0])
    return whole[start : min(start + size, whole.shape[0])]


def _whole_of(shard: Any, group: Group) -> torch.Tensor:
    """The rows of all processes."""
    shape = shard.shape
    local = shard.to_local().detach()
    size = -(-shape[0] // group.world_size)
    padded = local.new_zeros((size, *shape[1:]))
    padded[: local.shape[0]] = local
    return torch.cat(group.all_gather(padded))[: shape[0]].clone()
