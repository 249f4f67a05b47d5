"""Muon for the matrices of a model's blocks, AdamW for the rest: their parameters and their updates."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nanodiff.common import UserError
from nanodiff.device import why_not_compiled

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


def normalised(G: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices G (K, m, n) in `dtype`, each divided by its Frobenius norm: spectral norm < 1; zeros stay zero."""
    norm = SAFETY * torch.linalg.matrix_norm(G, keepdim=True)
    return (G / norm.clamp_min(1e-30)).to(dtype)


def polar_express(X: Tensor) -> Tensor:
    """(K, m, n) from `normalised` -> (K, m, n): nearly U V^T of each matrix X = U S V^T.

    Singular values above 1e-3 end within [0.98, 1.01]. Two cheaper forms were too inexact in bf16 (runs/LOG.md): two
    steps at a time on the Gram matrix, and adding a to B's diagonal, which saves baddbmm's copy of X.
    """
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT  # (K, m, n), m <= n
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT  # (K, m, m)
        B = torch.baddbmm(A, A, A, beta=b / SAFETY**3, alpha=c / SAFETY**5)
        X = torch.baddbmm(X, B, X, beta=a / SAFETY)  # a X + (b A + c A^2) X
    return X.mT if tall else X


def look_ahead(G, M, mu, dtype, finite):
    """Update momentum M with G, if `finite`; return Nesterov's look-ahead, normalised."""
    G = torch.where(finite, G, M)
    M.lerp_(G, 1 - mu)
    return normalised(G.lerp(M, mu), dtype)


def descend(P, U, rate, decay, finite):
    P.copy_(torch.where(finite, P * (1 - decay) - U.float() * rate, P))  # in bf16 the rate would be rounded


def pays_to_compile(device: torch.device) -> bool:
    """Does torch.compile make Muon's element-wise arithmetic faster? On a CPU it costs more than it saves."""
    return device.type == "cuda" and not why_not_compiled(device)


class Muon:
    """Momentum, Nesterov's look-ahead, polar factor (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    The polar factor is computed in bf16 if the model is, else in fp32.
    """

    keeps = ("momentum",)  # state tensors per parameter

    def __init__(self, device: torch.device, compile: bool, compute_dtype: torch.dtype):
        self.dtype = torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32
        self.compiled = compile and pays_to_compile(device)
        halves = look_ahead, descend
        if self.compiled:  # each becomes one pass over memory; tests/test_cuda.py compares them with eager code
            halves = [torch.compile(half, dynamic=False) for half in halves]
        self.look_ahead, self.descend = halves

    def update(self, group: dict, step: int, finite, P, G, M) -> None:
        """Update matrices P (K, m, n) and their momenta M by gradients G, at step 1, 2, ...

        If not `finite`, a bool on their device, both stay. The rate scales with sqrt(max(1, m / n)).
        """
        rows, cols = P.shape[1:]
        mu = min(MOMENTUM, 0.85 + (MOMENTUM - 0.85) * (step - 1) / MOMENTUM_WARMUP)
        rate = group["lr"] * max(1.0, rows / cols) ** 0.5
        factors = [mu, rate, group["lr"] * group["weight_decay"]]
        if self.compiled:  # a changing number would recompile; copying one to a GPU would sync
            factors = [torch.full((), x, device=P.device) for x in factors]
        X = self.look_ahead(G, M, factors[0], self.dtype, finite)
        self.descend(P, polar_express(X), *factors[1:], finite)


@dataclass
class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    beta2: float

    keeps = ("exp_avg", "exp_avg_sq")

    def update(self, group: dict, step: int, finite, *tensors) -> None:
        """Update weights of any shape, exp_avg and exp_avg_sq by gradients, at step 1, 2, ... if `finite`. `tensors`:
        weights, gradients, exp_avg, exp_avg_sq."""
        if finite.device.type == "mps" and not finite:  # whose kernel ignores found_inf
            return
        past_steps = torch.full((), step - 1.0, device=finite.device)  # fp32; the kernel adds 1
        adamw(
            *([x] for x in tensors),
            [],  # maxima, for amsgrad
            [past_steps],
            fused=True,
            found_inf=(~finite).float(),  # skips the update
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=0.9,
            beta2=self.beta2,
            eps=1e-8,
            weight_decay=group["weight_decay"],
        )


BLOCKS = ("blocks.", "input_blocks.", "middle_block.", "output_blocks.")  # DiT's; the UNet's
# Embeddings, the UNet's first convolution, last layers; adaLN, a third of a DiT, needs no Muon
NOT_MUON = r"\w+_emb(ed)?\.|vector_|input_blocks\.0\.|final\.|out\.|.*\.ada\."


def param_groups(model: torch.nn.Module, optimizer: str, lr: float, muon_lr: float, weight_decay: float) -> list[dict]:
    """Sort the parameters that learn into an Optimizer's groups.

    "muon": Muon at `muon_lr` for the blocks' matrices except adaLN's, with convolutions as (out, rest); AdamW at `lr`
    for the rest. "adamw": AdamW for everything. Weight decay is decoupled, on tensors of 2 or more dimensions.
    """
    matrices = dict(kind="adamw", initial_lr=lr, weight_decay=weight_decay)
    vectors = matrices | dict(weight_decay=0.0)
    muon = matrices | dict(kind="muon", initial_lr=muon_lr)
    groups = [matrices, vectors, muon]  # AdamW first: its all-gathers run while Muon computes
    for group in groups:
        group |= dict(lr=group["initial_lr"], params={})
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        group = matrices
        if p.ndim < 2:
            group = vectors
        elif optimizer == "muon" and not re.match(NOT_MUON, name):
            if not name.startswith(BLOCKS):
                raise UserError(f"optimizer=muon: {name} is in neither BLOCKS nor NOT_MUON of {__name__}")
            group = muon
        group["params"][name] = p
    return [group for group in groups if group["params"]]


@dataclass
class LossScaler:
    """Scales the loss by 2^lg_loss_scale, so that small gradients do not underflow in fp16 (IDDPM's fp16 trainer).

    The exponent grows by 0.001 each good step and falls by 1 on overflow. Disabled (bf16, fp32) the scale is 1.
    """

    enabled: bool
    lg_loss_scale: float = 20.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * 2.0**self.lg_loss_scale if self.enabled else loss

    @property
    def inv_scale(self) -> float:
        return 1 / self.scale(1.0)

    @property
    def can_skip(self) -> bool:
        """May this step overflow? Below a scale of 2 another reason is likelier."""
        return self.enabled and self.lg_loss_scale >= 1

    def update(self, overflow: bool) -> None:
        if self.enabled:
            self.lg_loss_scale += -1.0 if overflow else 0.001
