"""Muon for the matrices of a model's blocks, AdamW for the rest; gradients averaged and state sharded over ranks.

The parameters of a group lie in a few flat fp32 buffers, each cut into `world` equal shares. Each step, for each
buffer: reduce-scatter the gradients in the same layout, while backward computes those of the buffers before it; update
this rank's share; all-gather the parameters, while the next buffer is updated. This is ZeRO stage 1 (Rajbhandari et al.
2020, arXiv:1910.02054). With one rank nothing is sent.
"""

import functools
import itertools
import math
import re

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from nanodiff.common import UserError, collective
from nanodiff.device import can_compile, choose_dtype

# Polar Express, the first 5 of 8 rows, then the last (Amsel et al. 2025, arXiv:2505.16932, listing 1): each polynomial
# a x + b x^3 + c x^5 is minimax for the output of those before it on singular values in [1e-3, 1]. After five, ripples
# from 0.84 to 1.13 amplify rounding: losses on two ranks and on one differ by 1% (fp32, 80 steps of a d2); with the
# last, by less than 0.01%.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # the listing's own: room for singular values that rounding pushes above 1
MOMENTUM, MOMENTUM_WARMUP = 0.95, 300  # Muon's, from 0.85 within 300 steps (modded-nanogpt)


def normalised(G: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Matrices G (K, m, n) in `dtype`, each divided by its Frobenius norm: spectral norm < 1; zeros stay zero."""
    return (G / (SAFETY * torch.linalg.matrix_norm(G, keepdim=True)).clamp_min(1e-30)).to(dtype)


def polar_express(X: torch.Tensor) -> torch.Tensor:
    """(K, m, n) from `normalised` -> (K, m, n): nearly U V^T of each matrix X = U S V^T.

    Singular values above 1e-3 end within [0.98, 1.01]. In bf16 a cheaper form, two steps at a time on the Gram
    matrix, blew a singular value up to 221.
    """
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X  # (K, m, n), m <= n
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT  # (K, m, m)
        B = torch.baddbmm(A, A, A, beta=b / SAFETY**3, alpha=c / SAFETY**5)
        X = torch.baddbmm(X, B, X, beta=a / SAFETY)  # a X + (b A + c A^2) X
    return X.mT if tall else X


def look_ahead(G, M, mu, scale, dtype):
    """Update momentum M with G times `scale`; return Nesterov's look-ahead, normalised."""
    G = G * scale
    M.lerp_(G, 1 - mu)
    return normalised(G.lerp(M, mu), dtype)


def descend(P, U, rate, decay):
    P.mul_(1 - decay).sub_(U.float() * rate)  # in bf16 the rate would be rounded


STATE = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}  # tensors kept for each parameter


def align(n: int) -> int:
    return -(-n // 16) * 16  # 64 bytes: cuBLAS and Inductor want aligned operands


def plan_buffer(params, kind: str, world: int):
    """(offset of each parameter, length of a share, runs of each share).

    AdamW is element-wise: its shares may split a parameter. Muon's matrices stay whole: largest first,
    each goes to the emptiest share. Within a share, a run [start, count, rows, cols] of matrices of one shape is one
    batch.
    """
    if kind == "adamw":
        ends = list(itertools.accumulate(align(p.numel()) for p in params))
        return [0, *ends[:-1]], align(-(-ends[-1] // world)), [[]] * world
    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in params]
    load, owner = [0] * world, {}
    for i in sorted(range(len(params)), key=lambda i: -params[i].numel()):
        owner[i] = load.index(min(load))
        load[owner[i]] += params[i].numel()
    offsets, runs, ends = [0] * len(params), [[] for _ in range(world)], [0] * world
    for i in sorted(owner, key=lambda i: (shapes[i], i)):
        r = owner[i]
        if not runs[r] or tuple(runs[r][-1][2:]) != shapes[i]:
            ends[r] = align(ends[r])
            runs[r].append([ends[r], 0, *shapes[i]])
        runs[r][-1][1] += 1
        offsets[i] = ends[r]
        ends[r] += params[i].numel()
    length = align(max(ends))
    return [owner[i] * length + offset for i, offset in enumerate(offsets)], length, runs


LEAST_PART = 2**20  # numbers per part: 4 MB


def cut_group(params, kind: str, world: int) -> list[list[int]]:
    """Indices of a group's parameters, cut in the model's order into up to 8 parts of about equal size.

    More parts overlap more of the exchange with backward. But small messages are slow too, and few
    matrices divide badly among ranks: a part has at least LEAST_PART numbers, and shares are padded by at most a tenth.
    """
    total = sum(p.numel() for p in params)
    ends = list(itertools.accumulate(p.numel() for p in params))
    most = max(1, min(8, total // LEAST_PART)) if world > 1 else 1
    for count in range(most, 0, -1):
        by_part = itertools.groupby(range(len(params)), key=lambda i: (ends[i] - 1) * count // total)
        parts = [list(part) for _, part in by_part]
        padded = world * sum(plan_buffer([params[i] for i in part], kind, world)[1] for part in parts)
        if padded <= 1.1 * total:
            break
    return parts  # at worst one


class Bucket:
    """Parameters of a group, turned into views of one flat buffer (world * share,); `own` is this rank's share."""

    def __init__(self, group: dict, part: list[int], rank: int, world: int, grad_dtype: torch.dtype):
        self.group, self.world, self.grad_dtype = group, world, grad_dtype
        self.names, self.params = [group["names"][i] for i in part], [group["params"][i] for i in part]
        self.place = min(group["places"][i] for i in part)  # backward reaches this parameter last
        self.missing, self.work = len(part), None  # gradients that backward owes; the collective in flight
        self.offsets, share, runs = plan_buffer(self.params, group["kind"], world)
        self.runs, self.mine = runs[rank], slice(rank * share, (rank + 1) * share)
        self.flat = torch.zeros(world * share, device=self.params[0].device)
        self.own, self.grad = self.flat[self.mine], None
        self.state = {key: torch.zeros_like(self.own) for key in STATE[group["kind"]]}
        for p, view in zip(self.params, self.views(self.flat)):
            p.data = view.copy_(p)
        self.pieces, end = [], 0  # in the buffer's order: parameters, and the gaps between and after them
        for offset, i in sorted(zip(self.offsets, range(len(self.params)))):
            self.pieces += [self.flat[end:offset], self.params[i]]
            end = offset + self.params[i].numel()
        self.pieces.append(self.flat[end:])

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a buffer with the layout of `flat`."""
        return [flat[offset : offset + p.numel()].view(p.shape) for p, offset in zip(self.params, self.offsets)]

    @collective("the reduce-scatter of the gradients")
    @torch.no_grad()
    def reduce_grads(self) -> None:
        """Start to reduce-scatter the gradients: this rank's share goes into `grad`."""
        start = self.flat.data_ptr()
        for name, p, offset in zip(self.names, self.params, self.offsets):
            if p.data_ptr() != start + 4 * offset:
                raise RuntimeError(f"{name} has left the optimizer's buffer: move the model before make_optimizer")
        # A missing gradient counts as zero, like the gaps
        full = torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).reshape(-1) for x in self.pieces])
        if self.world == 1:
            self.grad = full
            return
        self.grad = torch.empty_like(self.own, dtype=self.grad_dtype)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
        self.work = reduce_scatter(self.grad, full.to(self.grad_dtype), async_op=True)

    def wait_grads(self) -> None:
        wait_all([self.work])
        self.grad, self.work, self.missing = self.grad.float(), None, len(self.params)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor):
        """Gather all shares into `flat`; returns the collective in flight, or None."""
        if self.world == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
        return all_gather(flat, share, async_op=True)


def wait_all(works) -> None:
    for work in filter(None, works):
        work.wait()


class Optimizer:
    """`norm, _ = sync_grads(); step(grad_scale); zero_grad()`; param_groups' "lr" may be set before a step.

    If last_micro_step is set before a step's last backward, each bucket is exchanged once its gradients are ready;
    the rest in sync_grads.
    """

    @collective("the broadcast of the first weights")
    @torch.no_grad()
    def __init__(self, groups, muon_dtype: torch.dtype, betas: tuple[float, float], compiled, grad_dtype):
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.muon_dtype, self.betas, self.steps = muon_dtype, betas, 0
        self.compiled, self.look_ahead, self.descend = compiled, look_ahead, descend
        if compiled:  # each one pass over memory
            self.look_ahead = torch.compile(look_ahead, dynamic=False)
            self.descend = torch.compile(descend, dynamic=False)
        self.param_groups, self.buckets = groups, []
        for group in groups:
            for part in cut_group(group["params"], group["kind"], self.world):
                self.buckets.append(Bucket(group, part, self.rank, self.world, grad_dtype))
        # In backward's order: collectives must run in the same order on every rank
        self.exchange_order = sorted(self.buckets, key=lambda bucket: -bucket.place)
        self.last_micro_step, self.unsent = False, self.exchange_order.copy()
        for bucket in self.buckets if self.world > 1 else ():
            dist.broadcast(bucket.flat, 0)  # the same start on every rank
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(functools.partial(self.count_grad, bucket))

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a rank sends per step: reduce-scatter and all-gather, (world - 1) shares each on a ring."""
        each = 4 + self.buckets[0].grad_dtype.itemsize
        return sum((self.world - 1) * each * bucket.own.numel() for bucket in self.buckets)

    def count_grad(self, bucket: Bucket, p: torch.Tensor) -> None:
        """Backward hook: the gradient of `p` is ready; exchange complete buckets."""
        if self.last_micro_step:
            bucket.missing -= 1
            while self.unsent and self.unsent[0].missing == 0:
                self.unsent.pop(0).reduce_grads()

    @collective("the reduce-scatter of the gradients")
    @torch.no_grad()
    def sync_grads(self, signal: int = 0) -> tuple[float, int]:
        """Average the gradients over ranks, into the buckets; a collective, once per step, that waits for the device.

        Returns, the same on every rank, the global L2 norm (not finite if any gradient on any rank is not) and the
        largest `signal` (0 to 31) that a rank received.
        """
        for bucket in self.unsent:
            bucket.reduce_grads()
        for bucket in self.buckets:
            bucket.wait_grads()
        self.last_micro_step, self.unsent = False, self.exchange_order.copy()
        norm_sq = torch.stack(torch._foreach_norm([bucket.grad for bucket in self.buckets])).square().sum()
        shared = torch.zeros(33, device=norm_sq.device)  # ranks that received each signal; the norm squared
        shared[signal] = 1
        shared[32] = norm_sq
        if self.world > 1:
            dist.all_reduce(shared)
        *counts, norm_sq = shared.tolist()
        signal = max(number for number, count in enumerate(counts) if count)
        return math.sqrt(norm_sq) / self.world, signal  # `grad` holds sums over ranks; step() turns them into means

    @collective("the all-gather of the weights")
    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> None:
        """One update by the gradients of sync_grads times `grad_scale`; a collective."""
        self.steps += 1
        works, scale = [], grad_scale / self.world
        for bucket in self.buckets:
            if bucket.group["kind"] == "muon":
                self.update_muon(bucket, scale)
            else:
                self.update_adamw(bucket, scale)
            bucket.grad = None
            works.append(bucket.all_gather(bucket.flat, bucket.own))  # while the next bucket computes
        wait_all(works)

    def update_muon(self, bucket: Bucket, scale: float) -> None:
        """Momentum, Nesterov's look-ahead, polar factor (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

        The rate scales with sqrt(max(1, rows / columns)).
        """
        lr = bucket.group["lr"]
        mu = min(MOMENTUM, 0.85 + (MOMENTUM - 0.85) * (self.steps - 1) / MOMENTUM_WARMUP)
        for start, count, rows, cols in bucket.runs:
            part = slice(start, start + count * rows * cols)
            P, G, M = (x[part].view(count, rows, cols) for x in (bucket.own, bucket.grad, bucket.state["momentum"]))
            rate, decay = lr * max(1.0, rows / cols) ** 0.5, lr * bucket.group["weight_decay"]
            factors = [mu, scale, rate, decay]
            if self.compiled:  # a changing number would recompile; copying one to a GPU would wait for it
                factors = [torch.full((), x, device=P.device) for x in factors]
            X = self.look_ahead(G, M, *factors[:2], self.muon_dtype)
            self.descend(P, polar_express(X), *factors[2:])

    def update_adamw(self, bucket: Bucket, scale: float) -> None:
        """torch's fused AdamW, on the whole share at once."""
        before = torch.full((), self.steps - 1.0, device=bucket.own.device)  # fp32; the kernel adds 1
        adamw(
            [bucket.own], [bucket.grad], [bucket.state["exp_avg"]], [bucket.state["exp_avg_sq"]], [], [before],
            fused=True, amsgrad=False, maximize=False, beta1=self.betas[0], beta2=self.betas[1], eps=1e-8,
            lr=bucket.group["lr"], weight_decay=bucket.group["weight_decay"],
            grad_scale=torch.full((), 1 / scale, device=bucket.own.device),
        )  # fmt: skip

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            for p in bucket.params:
                p.grad = None

    @collective("the gathering of non-finite gradients")
    @torch.no_grad()
    def not_finite(self) -> str:
        """Each rank's parameter with the largest share of bad gradients, in words; a collective."""
        worst = (0.0, "")
        for bucket in self.buckets:
            for name, p in zip(bucket.names, bucket.params):
                if p.grad is not None:
                    worst = max(worst, (1 - float(p.grad.isfinite().float().mean()), name))
        every = [worst] * self.world
        if self.world > 1:
            dist.all_gather_object(every, worst)
        found = [f"rank {rank}: {share:.0%} of {name}" for rank, (share, name) in enumerate(every) if share > 0]
        return ", ".join(found) or "finite on each rank, not their sum"

    @collective("the all-gather of the optimizer's state")
    @torch.no_grad()
    def state_dict(self) -> dict:
        """{"step": int, "momentum/<name>" or "exp_avg/<name>" and "exp_avg_sq/<name>": fp32, CPU}; a collective.

        Loads on any number of ranks; empty except on rank 0.
        """
        state = {"step": self.steps}
        for bucket in self.buckets:
            for key, share in bucket.state.items():
                full = share if self.world == 1 else torch.empty_like(bucket.flat)
                wait_all([bucket.all_gather(full, share)])
                if self.rank == 0:
                    for name, view in zip(bucket.names, bucket.views(full)):
                        state[f"{key}/{name}"] = view.to("cpu", copy=True)
        return state if self.rank == 0 else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Load this rank's share of a state_dict from any number of ranks."""
        mine = {f"{key}/{name}" for bucket in self.buckets for key in bucket.state for name in bucket.names}
        for name in sorted({"step", *mine} ^ state.keys()):
            raise UserError(f"optimizer state: {name!r} is {'unknown here' if name in state else 'missing'}")
        self.steps = int(state["step"])
        for bucket in self.buckets:
            for key, share in bucket.state.items():
                full = torch.zeros_like(bucket.flat)
                for name, view in zip(bucket.names, bucket.views(full)):
                    view.copy_(state[f"{key}/{name}"])
                share.copy_(full[bucket.mine])


BLOCKS = ("blocks.", "input_blocks.", "middle_block.", "output_blocks.")  # DiT's; the UNet's
NOT_MUON = r"input_blocks\.0\.|.*\.ada\."  # the UNet's first convolution; adaLN, a third of a DiT, needs no Muon


def make_optimizer(
    model: torch.nn.Module, optimizer: str = "muon", lr: float = 3e-3, muon_lr: float = 0.02, weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999), compile: bool = False, grad_dtype: torch.dtype = torch.float32,
) -> Optimizer:  # fmt: skip
    """The optimizer of a model that is already on its device, in fp32; a collective.

    "muon": Muon at `muon_lr`, in bf16 where native, for the blocks' matrices except adaLN's, convolutions as (out,
    rest); AdamW at `lr` for the rest. "adamw": AdamW for everything. Weight decay is decoupled, on tensors of 2 or more
    dimensions. `compile`: on CUDA, Muon's element-wise arithmetic too; on a CPU that takes longer than it saves.
    `grad_dtype`: dtype of the gradients that ranks exchange, and of their sum.
    """
    groups = []  # AdamW first: its all-gathers run while Muon computes
    for kind, rate, decay in (("adamw", lr, weight_decay), ("adamw", lr, 0.0), ("muon", muon_lr, weight_decay)):
        groups.append(dict(kind=kind, lr=rate, initial_lr=rate, weight_decay=decay, names=[], params=[], places=[]))
    for place, (name, p) in enumerate(model.named_parameters()):
        if not p.requires_grad:
            continue
        assert p.dtype == torch.float32, f"{name} is {p.dtype}; the weights are kept in fp32"
        index = 0 if p.ndim >= 2 else 1
        if optimizer == "muon" and p.ndim >= 2 and name.startswith(BLOCKS) and not re.match(NOT_MUON, name):
            index = 2
        for key, value in (("names", name), ("params", p), ("places", place)):
            groups[index][key].append(value)
    device = next(model.parameters()).device
    compiled = compile and device.type == "cuda" and not can_compile(device)
    native = choose_dtype("auto", device) == torch.bfloat16
    muon_dtype = torch.bfloat16 if native else torch.float32
    return Optimizer([group for group in groups if group["names"]], muon_dtype, betas, compiled, grad_dtype)


class LossScaler:
    """Scales the loss by 2^lg_loss_scale, so that small gradients do not underflow in fp16 (IDDPM's fp16 trainer).

    The exponent grows by 0.001 each good step and falls by 1 on overflow. Disabled (bf16, fp32) the scale is 1.
    """

    def __init__(self, enabled: bool):
        self.enabled, self.lg_loss_scale, self.skipped_in_a_row = enabled, 20.0, 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2.0**self.lg_loss_scale if self.enabled else loss

    @property
    def inv_scale(self) -> float:
        return 2.0**-self.lg_loss_scale if self.enabled else 1.0

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.lg_loss_scale += -1.0 if overflow else 0.001
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflow else 0
        if self.lg_loss_scale < 0:
            skipped = f"{self.skipped_in_a_row} steps skipped in a row"
            raise FloatingPointError(f"gradients are not finite: {skipped}, and the loss scale is below 1")

    def state_dict(self) -> dict:
        return {"lg_loss_scale": self.lg_loss_scale, "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict) -> None:
        self.lg_loss_scale, self.skipped_in_a_row = state["lg_loss_scale"], state["skipped_in_a_row"]
