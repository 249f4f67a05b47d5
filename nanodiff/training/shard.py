"""The optimizer's state sharded over ranks, and the exchange of gradients and weights; optim.py has the updates.

The parameters lie in a few flat fp32 buffers, each cut into one equal share per rank. Each step, for each buffer:
reduce-scatter the gradients, while backward still computes those of earlier layers; update this rank's share;
all-gather the weights, until the block that reads them runs next. This is ZeRO stage 1 (Rajbhandari et al. 2020,
arXiv:1910.02054). A single rank runs the same code and sends nothing.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanodiff.common import Tensors, get_dist
from nanodiff.device import host_copy, to_host
from nanodiff.dist import collective


def align(n: int) -> int:
    return -(-n // 16) * 16  # 64 bytes: cuBLAS and Inductor want aligned operands


def plan_buffer(params, kind: str, world: int):
    """(offset of each parameter, length of a share, per share the batches that are updated at once: {shape: [start,
    end]}).

    AdamW's shares may cut through a parameter. Muon needs whole matrices: the next largest goes to the rank with the
    least so far. Matrices of one shape lie side by side, to be updated as one batch.
    """
    sizes = [p.numel() for p in params]
    if kind != "muon":
        *starts, end = itertools.accumulate(map(align, sizes), initial=0)
        share = align(-(-end // world))
        return starts, share, [{(share,): [0, share]}] * world

    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in params]  # a convolution is (out, rest)
    places = [None] * len(params)  # (rank, offset in its share)
    ends = [0] * world
    batches = [{} for _ in range(world)]
    for i in sorted(range(len(params)), key=lambda i: (-sizes[i], shapes[i])):
        rank = ends.index(min(ends))
        begin = align(ends[rank])
        batch = batches[rank].setdefault(shapes[i], [begin, begin])
        places[i] = rank, batch[1]
        batch[1] += sizes[i]
        ends[rank] = batch[1]
    share = align(max(ends))
    starts = [rank * share + offset for rank, offset in places]
    return starts, share, batches


LEAST_PART = 2**20  # numbers per part: 4 MB


def cut_group(group: dict, world: int) -> list[dict]:
    """A group's parameters {name: p}, cut in the model's order into up to 8 parts of about equal size.

    More parts overlap more of the exchange with backward. Small messages are slow, so a part has LEAST_PART numbers or
    more. A few matrices rarely split evenly, so padding is capped at a tenth.
    """
    params = group["params"]
    ends = list(itertools.accumulate(p.numel() for p in params.values()))
    total = ends[-1]
    most = min(8, total // LEAST_PART) if world > 1 else 1
    for count in range(most, 1, -1):
        parts = [{} for _ in range(count)]
        for name, end in zip(params, ends):
            parts[(end - 1) * count // total][name] = params[name]
        parts = [part for part in parts if part]  # a large parameter fills several
        share = sum(plan_buffer([*part.values()], group["kind"], world)[1] for part in parts)
        if world * share <= 1.1 * total:
            return parts
    return [params]


@dataclass(eq=False)
class Buffer:
    """Parameters of a group as views of one flat tensor (world * share,); `weights` is this rank's share."""

    group: dict
    rule: object  # Muon or AdamW
    named_params: dict
    rank: int
    world: int
    grad_dtype: torch.dtype

    work = None  # handle of the running reduce-scatter of gradients, or all-gather of weights
    grad = None  # gradient of `weights`, from sync_grads to zero_grad

    def __post_init__(self):
        self.names = list(self.named_params)
        self.params = params = list(self.named_params.values())
        self.missing = len(params)  # gradients that backward has yet to compute
        self.offsets, share, batches = plan_buffer(params, self.group["kind"], self.world)
        self.batches = batches[self.rank]
        self.share_slice = slice(self.rank * share, (self.rank + 1) * share)
        self.flat = torch.zeros(self.world * share, device=params[0].device)
        self.weights = self.flat[self.share_slice]
        self.state = {key: torch.zeros_like(self.weights) for key in self.rule.keeps}
        for p, view in zip(params, self.views(self.flat)):
            p.data = view.copy_(p)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of `flat`, a tensor laid out like the weights."""
        return [flat[offset : offset + p.numel()].view(p.shape) for p, offset in zip(self.params, self.offsets)]

    @collective("the reduce-scatter of the gradients")
    def reduce_grads(self) -> None:
        """Start to sum the gradients over ranks; this rank's share of the sum goes into `grad`."""
        self.wait()
        full = torch.zeros_like(self.flat, dtype=self.grad_dtype)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        torch._foreach_copy_(self.views(full), grads)
        for p in self.params:
            p.grad = None  # frees 4 bytes per parameter while backward computes the next
        if self.world == 1:
            self.grad = full
            return
        self.grad = torch.empty_like(self.weights, dtype=self.grad_dtype)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
        self.work = reduce_scatter(self.grad, full, async_op=True)

    def update(self, step: int, finite: Tensor) -> None:
        """Update `weights` by `grad` at step 1, 2, ... if `finite`."""
        tensors = self.weights, self.grad, *self.state.values()
        for shape, (start, end) in self.batches.items():
            self.rule.update(self.group, step, finite, *(x[start:end].view(-1, *shape) for x in tensors))

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None

    def all_gather(self, flat: Tensor, share: Tensor):
        """Start to gather every rank's `share` into `flat`; returns the handle, or None if there is nothing to send."""
        if self.world == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
        return all_gather(flat, share, async_op=True)

    def gathered(self, share: Tensor) -> Tensor:
        """A collective: every rank's `share`, in the layout of `flat`."""
        if self.world == 1:
            return share
        full = torch.empty_like(self.flat)
        self.all_gather(full, share).wait()
        return full

    def tensors(self, share: Tensor, prefix: str = "") -> Tensors:
        """A collective: {prefix + name: part} of every rank's `share`, copied to the CPU; empty except on rank 0."""
        full = self.gathered(share)
        if self.rank > 0:
            return {}
        return host_copy({prefix + name: view for name, view in zip(self.names, self.views(full))})

    def share_of(self, tensors: Tensors, prefix: str = "") -> Tensor:
        """The inverse of `tensors`: this rank's share."""
        full = torch.zeros_like(self.flat)
        for name, view in zip(self.names, self.views(full)):
            view.copy_(tensors[prefix + name])
        return full[self.share_slice]


class Optimizer:
    """Updates the param_groups of a model that is already on its device, in fp32. Making one is a collective.

    `sync_grads(stop); step(grad_scale); norm, stop = read_norm(); zero_grad()`; the groups' "lr" may be set before.
    `rules`: {kind of group: Muon or AdamW}. `grad_dtype`: dtype of the gradients that ranks exchange, and of their sum.
    If last_micro_step is set before a step's last backward, each buffer's exchange starts as soon as its gradients are
    there; else sync_grads starts it.
    """

    steps = 0
    last_micro_step = False

    @collective("the broadcast of the first weights")
    @torch.no_grad()
    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[dict],
        rules: dict,
        grad_dtype: torch.dtype,
    ):
        rank, _, world = get_dist()
        self.world = world
        self.param_groups = groups
        self.buffers = [
            Buffer(group, rules[group["kind"]], part, rank, world, grad_dtype)
            for group in groups
            for part in cut_group(group, world)
        ]
        # Backward's order, as a buffer is complete at its first parameter. All ranks must exchange in one order
        order = list(dict(model.named_parameters()))
        self.exchange_order = sorted(self.buffers, key=lambda buffer: -order.index(buffer.names[0]))
        self.unsent = self.exchange_order.copy()
        if world == 1:
            return
        reader = {}  # of each parameter: the part that computes with it, else the model
        for part in (model, *model.parts()):
            reader |= dict.fromkeys(part.parameters(), part)
            part.register_forward_pre_hook(self.wait_weights)
        for buffer in self.buffers:
            dist.broadcast(buffer.flat, 0)  # the same start on every rank
            buffer.readers = {reader[p] for p in buffer.params}
            for p in buffer.params:
                p.register_post_accumulate_grad_hook(functools.partial(self.count_grad, buffer))

    def count_grad(self, buffer: Buffer, p: Tensor) -> None:
        """Backward hook: the gradient of `p` is there. Starts the exchange of complete buffers."""
        if self.last_micro_step:
            buffer.missing -= 1
            while self.unsent and self.unsent[0].missing == 0:
                self.unsent.pop(0).reduce_grads()

    @collective("the reduce-scatter of the gradients")
    def sync_grads(self, stop: int) -> Tensor:
        """A collective, once per step: average gradients over ranks, without waiting for a GPU.

        Returns the global L2 norm, on the device and equal on every rank; not finite if any gradient is not, or if a
        rank asks to stop: its `stop` is not 0.
        """
        for buffer in self.unsent:
            buffer.reduce_grads()
        for buffer in self.buffers:
            buffer.wait()
            buffer.grad = buffer.grad.float()
            buffer.missing = len(buffer.params)
        self.unsent = self.exchange_order.copy()
        norms = torch.stack(torch._foreach_norm([buffer.grad for buffer in self.buffers]))
        norm_sq = norms.square().sum() + (math.nan if stop else 0.0)  # NaN: no rank takes the step
        # full_like, not an assignment: copying a number from the host would wait for the GPU
        shared = torch.stack([norm_sq, torch.full_like(norm_sq, bool(stop))])
        if self.world > 1:
            dist.all_reduce(shared)
        shared[0] = norm = shared[0].sqrt() / self.world  # `grad` holds sums over ranks: step() turns them into means
        self.finite = norm.isfinite()
        self.shared = to_host(shared)
        self.copy_event = torch.cuda.current_stream().record_event() if shared.is_cuda else None
        return norm

    def read_norm(self) -> tuple[float, float]:
        """(norm, how many ranks asked to stop), on the host. Waits for the GPU: call it when work is queued, after
        step."""
        if self.copy_event:
            self.copy_event.synchronize()
        norm, num_stopping = self.shared.tolist()
        self.steps -= not math.isfinite(norm)
        return norm, num_stopping

    @collective("the all-gather of the weights")
    def step(self, grad_scale: float | Tensor = 1.0) -> None:
        """A collective: one update by the gradients of sync_grads times `grad_scale`. If the norm is not finite,
        neither weights nor state change.

        The all-gathers still run when it returns: before reading weights other than by the model, call wait_weights.
        """
        self.steps += 1
        grad_scale = torch.where(self.finite, grad_scale / self.world, 0.0)
        torch._foreach_mul_([buffer.grad for buffer in self.buffers], grad_scale)
        for buffer in self.buffers:
            buffer.update(self.steps, self.finite)
            buffer.work = buffer.all_gather(buffer.flat, buffer.weights)  # while the next buffer computes

    @collective("the all-gather of the weights")
    def wait_weights(self, part=None, *_) -> None:
        """Wait for the weights that the forward of `part` reads; None: for all."""
        for buffer in self.buffers:
            if part is None or part in buffer.readers:
                buffer.wait()

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            buffer.grad = None  # those of the parameters went into it

    @collective("the gathering of non-finite gradients")
    def not_finite(self) -> str:
        """A collective: the parameter with the largest share of non-finite gradients, summed over ranks, in words."""
        shares = {}
        for buffer in self.buffers:
            bad = buffer.gathered(1 - buffer.grad.isfinite().float())
            shares |= {float(part.mean()): name for name, part in zip(buffer.names, buffer.views(bad))}
        share, name = max(shares.items())
        return f"{share:.0%} of {name}" if share else "gradients finite, their norm is not"

    @collective("the all-gather of the optimizer's state")
    def state_dict(self) -> dict:
        """A collective: {"step": int, "momentum/<name>" or "exp_avg/<name>" and "exp_avg_sq/<name>": fp32, CPU}.

        Loads on any number of ranks; has only "step" except on rank 0.
        """
        self.wait_weights()  # the checkpoint also holds the weights
        state = {"step": self.steps}
        for buffer in self.buffers:
            for key, share in buffer.state.items():
                state |= buffer.tensors(share, f"{key}/")
        return state

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's share of a state_dict from any number of ranks."""
        self.steps = state["step"]
        for buffer in self.buffers:
            for key, share in buffer.state.items():
                share.copy_(buffer.share_of(state, f"{key}/"))
