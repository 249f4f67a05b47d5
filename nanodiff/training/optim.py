"""Muon for the matrices of a model's blocks, AdamW for the rest; gradients averaged and state sharded over ranks.

The parameters lie in a few flat fp32 buffers, each cut into one equal share per rank. Each step, for each buffer:
reduce-scatter the gradients, while backward still computes those of earlier layers; update this rank's share;
all-gather the weights, until the model next reads them. This is ZeRO stage 1 (Rajbhandari et al. 2020,
arXiv:1910.02054). A single rank runs the same code and sends nothing.
"""

import functools
import itertools
import math
import re

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from nanodiff.common import UserError, get_dist
from nanodiff.device import choose_dtype, host_copy, why_not_compiled
from nanodiff.dist import collective

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
MOMENTUM = 0.95  # Muon's, which starts at 0.85 (modded-nanogpt)
MOMENTUM_WARMUP = 300  # steps


def normalised(G: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Matrices G (K, m, n) in `dtype`, each divided by its Frobenius norm: spectral norm < 1; zeros stay zero."""
    norm = SAFETY * torch.linalg.matrix_norm(G, keepdim=True)
    return (G / norm.clamp_min(1e-30)).to(dtype)


def polar_express(X: torch.Tensor) -> torch.Tensor:
    """(K, m, n) from `normalised` -> (K, m, n): nearly U V^T of each matrix X = U S V^T.

    Singular values above 1e-3 end within [0.98, 1.01]. Two cheaper forms were too inexact in bf16 (runs/LOG.md): two
    steps at a time on the Gram matrix, and a on the diagonal of B, which saves the copy that baddbmm makes of X.
    """
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT  # (K, m, n), m <= n
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT  # (K, m, m)
        B = torch.baddbmm(A, A, A, beta=b / SAFETY**3, alpha=c / SAFETY**5)
        X = torch.baddbmm(X, B, X, beta=a / SAFETY)  # a X + (b A + c A^2) X
    return X.mT if tall else X


def look_ahead(G, M, mu, dtype):
    """Update momentum M with G; return Nesterov's look-ahead, normalised."""
    M.lerp_(G, 1 - mu)
    return normalised(G.lerp(M, mu), dtype)


def descend(P, U, rate, decay):
    P.mul_(1 - decay).sub_(U.float() * rate)  # in bf16 the rate would be rounded


STATE = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}  # tensors kept for each parameter


BLOCKS = ("blocks.", "input_blocks.", "middle_block.", "output_blocks.")  # DiT's; the UNet's
NOT_MUON = r"input_blocks\.0\.|.*\.ada\."  # the UNet's first convolution; adaLN, a third of a DiT, needs no Muon
ENDS = r"\w+_emb(ed)?\.|vector_|final\.|out\."  # embeddings and last layers


def param_groups(model: torch.nn.Module, optimizer: str, lr: float, muon_lr: float, weight_decay: float) -> list[dict]:
    """The parameters of a model that learn, by what updates them: an Optimizer's groups.

    "muon": Muon at `muon_lr` for the blocks' matrices except adaLN's, convolutions as (out, rest); AdamW at `lr` for
    the rest. "adamw": AdamW for everything. Weight decay is decoupled, on tensors of 2 or more dimensions.
    """
    matrices = dict(kind="adamw", initial_lr=lr, weight_decay=weight_decay)
    vectors = dict(kind="adamw", initial_lr=lr, weight_decay=0.0)
    muon = dict(kind="muon", initial_lr=muon_lr, weight_decay=weight_decay)
    groups = [matrices, vectors, muon]  # AdamW first: its all-gathers run while Muon computes
    for group in groups:
        group |= dict(lr=group["initial_lr"], names=[], params=[])
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        group = matrices
        if p.ndim < 2:
            group = vectors
        elif optimizer == "muon":
            if name.startswith(BLOCKS):
                if not re.match(NOT_MUON, name):
                    group = muon
            elif not re.match(ENDS, name):
                raise UserError(f"optimizer=muon: {name} is in neither BLOCKS nor ENDS of {__name__}; accepted: adamw")
        group["names"].append(name)
        group["params"].append(p)
    return [group for group in groups if group["names"]]


def pays_to_compile(device: torch.device) -> bool:
    """Does torch.compile make Muon's element-wise arithmetic faster? On a CPU it takes longer than it saves."""
    return device.type == "cuda" and not why_not_compiled(device)


def align(n: int) -> int:
    return -(-n // 16) * 16  # 64 bytes: cuBLAS and Inductor want aligned operands


def plan_buffer(params, kind: str, world: int):
    """(offset of each parameter, length of a share, matrices of each share).

    AdamW's shares, and any other's, may cut through a parameter. Muon needs whole matrices: assign them, largest first,
    to the rank with the least. The matrices of one shape lie side by side, to be updated as one batch: {(rows, cols):
    [start, count]}.
    """
    sizes = [p.numel() for p in params]
    if kind != "muon":
        ends = list(itertools.accumulate(align(size) for size in sizes))
        share = align(math.ceil(ends[-1] / world))
        return [0, *ends[:-1]], share, [{}] * world

    load = [0] * world
    owner = {}
    for i in sorted(range(len(params)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        load[rank] += sizes[i]
        owner[i] = rank

    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in params]  # a convolution is (out, rest)
    offsets = {}  # from the start of the owner's share
    ends = [0] * world
    batches = [{} for _ in range(world)]
    for i in sorted(owner, key=lambda i: (shapes[i], i)):
        rank = owner[i]
        batch = batches[rank].setdefault(shapes[i], [align(ends[rank]), 0])
        offsets[i] = batch[0] + batch[1] * sizes[i]
        batch[1] += 1
        ends[rank] = offsets[i] + sizes[i]
    share = align(max(ends))
    starts = [owner[i] * share + offsets[i] for i in range(len(params))]
    return starts, share, batches


LEAST_PART = 2**20  # numbers per part: 4 MB


def cut_group(params, kind: str, world: int) -> list[list[int]]:
    """Indices of a group's parameters, cut in the model's order into up to 8 parts of about equal size.

    More parts overlap more of the exchange with backward. But small messages are slow, so a part has LEAST_PART numbers
    or more. And few matrices cannot be shared equally among ranks, so padding is limited to a tenth.
    """
    ends = list(itertools.accumulate(p.numel() for p in params))
    total = ends[-1]
    most = min(8, total // LEAST_PART) if world > 1 else 1
    for count in range(most, 1, -1):
        parts = [[] for _ in range(count)]
        for i, end in enumerate(ends):
            parts[(end - 1) * count // total].append(i)
        parts = [part for part in parts if part]  # a large parameter fills several
        length = 0
        for part in parts:
            _, share, _ = plan_buffer([params[i] for i in part], kind, world)
            length += world * share
        if length <= 1.1 * total:
            return parts
    return [list(range(len(params)))]


class Buffer:
    """Parameters of a group as views of one flat tensor (world * share,); `own` is this rank's share."""

    def __init__(
        self,
        group: dict,
        part: list[int],
        rank: int,
        world: int,
        grad_dtype: torch.dtype,
    ):
        self.group = group
        self.world = world
        self.grad_dtype = grad_dtype
        self.names = [group["names"][i] for i in part]
        self.params = [group["params"][i] for i in part]
        self.missing = len(part)  # gradients that backward has still to compute
        self.work = None  # handle of the running reduce-scatter of gradients, or all-gather of weights
        self.offsets, share, batches = plan_buffer(self.params, group["kind"], world)
        self.batches = batches[rank]
        self.mine = slice(rank * share, (rank + 1) * share)
        self.flat = torch.zeros(world * share, device=self.params[0].device)
        self.own = self.flat[self.mine]
        self.grad = None  # gradient of `own`, between sync_grads and step
        self.state = {key: torch.zeros_like(self.own) for key in STATE[group["kind"]]}
        for p, view in zip(self.params, self.views(self.flat)):
            p.data = view.copy_(p)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `flat`, laid out like the weights, that belong to each parameter."""
        return [flat[offset : offset + p.numel()].view(p.shape) for p, offset in zip(self.params, self.offsets)]

    @collective("the reduce-scatter of the gradients")
    @torch.no_grad()
    def reduce_grads(self) -> None:
        """Start to sum the gradients over ranks: this rank's share of the sum goes into `grad`."""
        self.wait()
        for name, p, view in zip(self.names, self.params, self.views(self.flat)):
            if p.data_ptr() != view.data_ptr():
                raise RuntimeError(f"{name} has left the optimizer's buffer: move the model before its optimizer")
        full = torch.zeros_like(self.flat, dtype=self.grad_dtype)
        grads = []
        for p in self.params:
            grad = p.grad
            if grad is None:
                grad = torch.zeros_like(p)
            grads.append(grad)
            p.grad = None  # 4 bytes a parameter, while backward computes the next
        torch._foreach_copy_(self.views(full), grads)
        if self.world == 1:
            self.grad = full
            return
        self.grad = torch.empty_like(self.own, dtype=self.grad_dtype)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
        self.work = reduce_scatter(self.grad, full, async_op=True)

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None

    def wait_grads(self) -> None:
        self.wait()
        self.grad = self.grad.float()
        self.missing = len(self.params)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor):
        """Start to gather every rank's `share` into `flat`; returns the handle, or None if there is nothing to send."""
        if self.world == 1:
            return None
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13
        return all_gather(flat, share, async_op=True)

    def gathered(self, share: torch.Tensor) -> torch.Tensor:
        """Every rank's `share`, in the layout of `flat`; a collective."""
        if self.world == 1:
            return share
        full = torch.empty_like(self.flat)
        self.all_gather(full, share).wait()
        return full

    def named(self, share: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name: part} of every rank's `share`, copied to the CPU; a collective. Empty except on rank 0."""
        full = self.gathered(share)
        if self.mine.start > 0:
            return {}
        return host_copy(dict(zip(self.names, self.views(full))))

    def share_of(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `named`: this rank's share."""
        full = torch.zeros_like(self.flat)
        for name, view in zip(self.names, self.views(full)):
            view.copy_(named[name])
        return full[self.mine]


class Optimizer:
    """Updates the param_groups of a model that is already on its device, in fp32; a collective.

    `norm, _ = sync_grads(); step(grad_scale); zero_grad()`; the groups' "lr" may be set before a step. Muon computes in
    bf16 where native. `grad_dtype`: dtype of the gradients that ranks exchange, and of their sum.
    Set last_micro_step before a step's last backward: then each buffer's exchange starts as soon as its gradients are
    there. sync_grads starts the others.
    """

    @collective("the broadcast of the first weights")
    @torch.no_grad()
    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[dict],
        beta2: float = 0.999,
        compile: bool = False,
        grad_dtype: torch.dtype = torch.float32,
    ):
        rank, _, self.world = get_dist()
        device = groups[0]["params"][0].device
        self.muon_dtype = torch.bfloat16 if choose_dtype("auto", device) == torch.bfloat16 else torch.float32
        self.beta2 = beta2
        self.steps = 0
        self.compiled = compile and pays_to_compile(device)
        self.look_ahead = look_ahead
        self.descend = descend
        if self.compiled:  # each becomes one pass over memory
            self.look_ahead = torch.compile(look_ahead, dynamic=False)
            self.descend = torch.compile(descend, dynamic=False)
        self.param_groups = groups
        self.buffers = [
            Buffer(group, part, rank, self.world, grad_dtype)
            for group in groups
            for part in cut_group(group["params"], group["kind"], self.world)
        ]
        # In backward's order: a buffer is complete at its first parameter. Collectives run in one order on every rank
        order = [name for name, _ in model.named_parameters()]
        self.exchange_order = sorted(self.buffers, key=lambda buffer: -order.index(buffer.names[0]))
        self.unsent = self.exchange_order.copy()
        self.last_micro_step = False
        self.in_fp32 = []  # (layer that computes with a bf16 copy of its weight, the weight)
        if self.world == 1:
            return
        for buffer in self.buffers:
            dist.broadcast(buffer.flat, 0)  # the same start on every rank
            for p in buffer.params:
                p.register_post_accumulate_grad_hook(functools.partial(self.count_grad, buffer))
        model.register_forward_pre_hook(self.wait_weights)  # runs eagerly: several ranks compile by blocks

    def count_grad(self, buffer: Buffer, p: torch.Tensor) -> None:
        """Backward hook: the gradient of `p` is there. Starts the exchange of complete buffers."""
        if self.last_micro_step:
            buffer.missing -= 1
            while self.unsent and self.unsent[0].missing == 0:
                self.unsent.pop(0).reduce_grads()

    def cast_weights(self, model: torch.nn.Module) -> None:
        """Have the blocks' linear layers compute with bf16 copies of their weights, until sync_grads. The copies are
        nodes of autograd, through which every backward of the step reaches the weights."""
        self.wait_weights()
        for name, layer in model.named_modules():
            if name.startswith(BLOCKS) and isinstance(layer, torch.nn.Linear):
                self.in_fp32.append((layer, layer.weight))
                layer._parameters["weight"] = layer.weight.bfloat16()  # not a leaf, which setattr would refuse

    @collective("the reduce-scatter of the gradients")
    @torch.no_grad()
    def sync_grads(self, stop: bool = False) -> tuple[float, bool]:
        """Average gradients over ranks: a collective, once a step; the only place where each step waits for the GPU.

        Returns, the same on every rank, the global L2 norm (not finite if any gradient on any rank is not) and whether
        any rank asked to stop.
        """
        for layer, weight in self.in_fp32:
            layer.weight = weight
        self.in_fp32.clear()
        for buffer in self.unsent:
            buffer.reduce_grads()
        for buffer in self.buffers:
            buffer.wait_grads()
        self.last_micro_step = False
        self.unsent = self.exchange_order.copy()
        norms = torch.stack(torch._foreach_norm([buffer.grad for buffer in self.buffers]))
        norm_sq = norms.square().sum()
        # full_like, not an assignment: copying a number from the host would wait for the GPU
        shared = torch.stack([norm_sq, torch.full_like(norm_sq, bool(stop))])
        if self.world > 1:
            dist.all_reduce(shared)
        norm_sq, num_stopping = shared.tolist()
        # `grad` holds sums over ranks: step() turns them into means
        return math.sqrt(norm_sq) / self.world, num_stopping > 0

    @collective("the all-gather of the weights")
    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> None:
        """One update by the gradients of sync_grads times `grad_scale`; a collective.

        The all-gathers still run at its end: before reading weights other than by the model, call wait_weights.
        """
        self.steps += 1
        torch._foreach_mul_([buffer.grad for buffer in self.buffers], grad_scale / self.world)
        for buffer in self.buffers:
            if buffer.group["kind"] == "muon":
                self.update_muon(buffer)
            else:
                self.update_adamw(buffer)
            buffer.grad = None
            buffer.work = buffer.all_gather(buffer.flat, buffer.own)  # while the next buffer computes, and the averages

    @collective("the all-gather of the weights")
    def wait_weights(self, *_) -> None:
        for buffer in self.buffers:
            buffer.wait()

    def update_muon(self, buffer: Buffer) -> None:
        """Momentum, Nesterov's look-ahead, polar factor (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

        The rate scales with sqrt(max(1, rows / columns)).
        """
        lr = buffer.group["lr"]
        decay = lr * buffer.group["weight_decay"]
        mu = min(MOMENTUM, 0.85 + (MOMENTUM - 0.85) * (self.steps - 1) / MOMENTUM_WARMUP)
        for (rows, cols), (start, count) in buffer.batches.items():
            part = slice(start, start + count * rows * cols)
            flat = (buffer.own, buffer.grad, buffer.state["momentum"])
            P, G, M = (x[part].view(count, rows, cols) for x in flat)
            rate = lr * max(1.0, rows / cols) ** 0.5
            factors = [mu, rate, decay]
            if self.compiled:  # a changing number would recompile; copying one to a GPU would wait for it
                factors = [torch.full((), x, device=P.device) for x in factors]
            X = self.look_ahead(G, M, factors[0], self.muon_dtype)
            self.descend(P, polar_express(X), *factors[1:])

    def update_adamw(self, buffer: Buffer) -> None:
        """torch's fused AdamW, on the whole share at once."""
        before = torch.full((), self.steps - 1.0, device=buffer.own.device)  # fp32; the kernel adds 1
        adamw(
            [buffer.own],
            [buffer.grad],
            [buffer.state["exp_avg"]],
            [buffer.state["exp_avg_sq"]],
            [],  # maxima, for amsgrad
            [before],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=buffer.group["lr"],
            beta1=0.9,
            beta2=self.beta2,
            eps=1e-8,
            weight_decay=buffer.group["weight_decay"],
        )

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            for p in buffer.params:
                p.grad = None

    @collective("the gathering of non-finite gradients")
    @torch.no_grad()
    def not_finite(self) -> str:
        """The parameter with the largest share of bad gradients, summed over ranks, in words; a collective."""
        worst = (0.0, "")
        for buffer in self.buffers:
            bad = buffer.gathered(1 - buffer.grad.isfinite().float())
            for name, part in zip(buffer.names, buffer.views(bad)):
                worst = max(worst, (float(part.mean()), name))
        share, name = worst
        return f"{share:.0%} of {name}" if share else "each number finite, not their norm"

    @collective("the all-gather of the optimizer's state")
    @torch.no_grad()
    def state_dict(self) -> dict:
        """{"step": int, "momentum/<name>" or "exp_avg/<name>" and "exp_avg_sq/<name>": fp32, CPU}; a collective.

        Loads on any number of ranks; without parameters except on rank 0.
        """
        self.wait_weights()  # a checkpoint has them too
        state = {"step": self.steps}
        for buffer in self.buffers:
            for key, share in buffer.state.items():
                for name, value in buffer.named(share).items():
                    state[f"{key}/{name}"] = value
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Load this rank's share of a state_dict from any number of ranks."""
        known = {"step"}
        for buffer in self.buffers:
            for key in buffer.state:
                known |= {f"{key}/{name}" for name in buffer.names}
        for name in sorted(known ^ state.keys()):
            raise UserError(f"optimizer state: {name!r} is {'unknown here' if name in state else 'missing'}")
        self.steps = int(state["step"])
        for buffer in self.buffers:
            for key, share in buffer.state.items():
                named = {name: state[f"{key}/{name}"] for name in buffer.names}
                share.copy_(buffer.share_of(named))


class LossScaler:
    """Scales the loss by 2^lg_loss_scale, so that small gradients do not underflow in fp16 (IDDPM's fp16 trainer).

    The exponent grows by 0.001 each good step and falls by 1 on overflow. Disabled (bf16, fp32) the scale is 1.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.lg_loss_scale = 20.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return loss
        return loss * 2.0**self.lg_loss_scale

    @property
    def inv_scale(self) -> float:
        if not self.enabled:
            return 1.0
        return 2.0**-self.lg_loss_scale

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.lg_loss_scale += -1.0 if overflow else 0.001
        if self.lg_loss_scale < 0:
            raise FloatingPointError("gradients overflow even at a loss scale below 1")
