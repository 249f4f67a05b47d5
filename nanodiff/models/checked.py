"""Does compiled code compute what eager code does? Nothing of it counts before that is known."""

import torch
from torch import _dynamo
from torch._inductor import config

from nanodiff.common import make_generator, print0
from nanodiff.dist import over_ranks


@torch.no_grad()
def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest norm of found - expected, over tensors, relative to the norm of expected; where that is tiny, to a
    hundredth of the mean norm."""
    norms = torch.stack([x.norm() for x in expected])
    errors = torch.stack([(a - b).norm() for a, b in zip(found, expected)])
    return float((errors / norms.clamp_min(norms.mean() / 100)).max())


class Checked:
    """A compiled model, compared with eager code before its results count.

    Compilers err: GCC 12 turns AVX512 code for CPUs that it does not know into gradients that are wrong or NaN. The
    first batch of each kind is computed twice more: outputs and gradients of its first and last image, compiled and
    eager, must agree as far as the dtype allows. If not, a CPU's code is compiled again for AVX2, a tenth slower; if
    that is wrong too, and on a GPU, the model runs uncompiled. Ranks decide together.
    """

    def __init__(self, raw, model):
        self.raw = raw
        self.model = model  # compiled: raw itself, if its blocks are
        self.config = raw.config
        self.known = set()  # kinds of batches: each has code of its own

    def __call__(self, x_t, t, **cond):
        kind = (x_t.shape, torch.is_grad_enabled(), *cond)
        if kind not in self.known:
            self.known.add(kind)
            self.check(x_t, t, cond)
        return self.model(x_t, t, **cond)

    def check(self, x_t, t, cond: dict) -> None:
        """Compare the code for batches like this one; replace it where it is wrong."""
        device = x_t.device.type
        bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        allowed = 0.25 if bf16 else 0.03  # 32 units of the last place; float32 may be TF32
        for attempt in range(2 if device == "cpu" else 1):
            if attempt:
                print0("compiled again for AVX2")
                config.cpp.simdlen = 256
                _dynamo.reset()
            off = self.difference(x_t, t, cond)
            is_wrong = int(over_ranks(int(not off <= allowed), what="the check of compiled code"))
            verdict = "wrong here" if is_wrong else "right"
            print0(f"compiled code is {verdict}: {off:.2g} from eager outputs and gradients (allowed: {allowed})")
            if not is_wrong:
                return
        print0("training goes on uncompiled")
        torch.compiler.set_stance("force_eager")

    def difference(self, x_t, t, cond: dict) -> float:
        """relative_error of the outputs, and the gradients of each weight, of the first and the last image.

        Of a new model adaLN and the last layer are zero, and so are most gradients: here they are random.
        """
        weights = [p for p in self.raw.parameters() if p.requires_grad]
        zeros = [p for p in weights if not p.any()]
        g = make_generator(0, device=x_t.device)
        rows = sorted({0, len(x_t) - 1})
        few = {name: x[rows] for name, x in cond.items()}
        with torch.no_grad():
            for p in zeros:
                p.normal_(std=0.1, generator=g)
        torch.clear_autocast_cache()  # copies of the weights
        out = self.model(x_t, t, **cond)
        found = [out[rows]]
        with torch.compiler.set_stance("force_eager"):
            expected = [self.raw(x_t[rows], t[rows], **few)]
            if out.requires_grad:
                v = torch.zeros_like(out)
                v[rows] = torch.randn(found[0].shape, generator=g, device=v.device).to(v.dtype)
                expected += torch.autograd.grad(expected, weights, v[rows], materialize_grads=True)
        if out.requires_grad:
            found += torch.autograd.grad(out, weights, v, materialize_grads=True)
        with torch.no_grad():
            for p in zeros:
                p.zero_()
        torch.clear_autocast_cache()
        return relative_error(found, expected)
