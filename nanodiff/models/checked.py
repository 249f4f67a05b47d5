"""Compare compiled code with eager code before its results count."""

import re
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import codecache, config

from nanodiff.common import Tensors, make_generator, print0
from nanodiff.device import run_uncompiled
from nanodiff.dist import from_first_rank, gather_objects

WRONG = "compiled code is wrong here"


def results(out: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The outputs and, if gradients are enabled, the gradients of the sum of their squares."""
    if not out.requires_grad:
        return [out]
    grads = torch.autograd.grad(out.square().sum(), weights, materialize_grads=True)
    return [out.detach(), *grads]


class Checked:
    """A compiled model, compared with eager code before its results count.

    Compilers err: on CPUs that GCC 12 does not know, its AVX512 code gives wrong or NaN gradients. So the first batch
    of each kind is computed twice more, compiled and eager. Outputs and gradients of its first and last image must
    agree as far as the dtype allows. If not, a CPU's code is compiled again for AVX2, a tenth slower. If that is wrong
    too, on a GPU, or if the compiler fails (no C++ compiler, no Python.h, no memory, a full disk), the model runs
    uncompiled. Ranks decide together.
    """

    def __init__(self, raw, model):
        self.raw = raw
        self.model = model  # compiled: raw itself, if its blocks are
        self.config = raw.config
        self.kinds = set()  # kinds of batches checked; each has its own code

    def __call__(self, x_t, t, **cond):
        kind = (x_t.shape, torch.is_grad_enabled(), *cond)
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.check(x_t, t, cond)
        return self.model(x_t, t, **cond)

    def check(self, x_t, t, cond: Tensors) -> None:
        """Compare the code for batches like this one; replace it where it is wrong."""
        device = x_t.device.type
        # 32 units of the last place: bf16's are 1/128, TF32's 1/1024
        tolerance = 0.25 if torch.is_autocast_enabled(device) else 0.03
        reason = ""  # why not to use it
        try:
            off = self.difference(x_t, t, cond)
            if not off <= tolerance:  # NaN is wrong, too
                reason = WRONG
            print0(
                f"{reason or 'compiled code is right'}: {off:.2g} from eager outputs and gradients "
                f"(allowed: {tolerance})"
            )
        except Exception as error:
            first, *lines = f"{type(error).__name__}: {error}".splitlines()
            reason = [first, *(line for line in lines if "error:" in line)][-1]
        reason = max(from_first_rank(gather_objects(reason), "the check of compiled code"))
        if not reason:
            return
        stub = re.search(rf"({re.escape(codecache.cache_dir())}/\S+): file too short", reason)
        if stub:  # torch keeps the empty file of a compiler that was killed
            Path(stub[1]).unlink(missing_ok=True)
        elif reason == WRONG and device == "cpu" and config.cpp.simdlen != 256:
            reason = "for AVX2"
            config.cpp.simdlen = 256
        else:
            print0(f"continuing uncompiled: {reason}")
            run_uncompiled()
            return
        print0(f"compiled again: {reason}")
        torch.compiler.reset()
        self.check(x_t, t, cond)

    def difference(self, x_t, t, cond: Tensors) -> float:
        """The largest relative error, by norms, of the first and last image's outputs and of each weight's gradient.
        Errors of tiny gradients are relative to a hundredth of the mean norm.

        In a new model adaLN and the last layer are zero, and so most gradients are; here those weights are random.
        """
        weights = [p for p in self.raw.parameters() if p.requires_grad]
        ends = slice(None, None, max(len(x_t) - 1, 1))
        few = {name: x[ends] for name, x in cond.items()}

        def eager():
            with torch.compiler.set_stance("force_eager"):
                return results(self.raw(x_t[ends], t[ends], **few), weights)

        eager()  # waits for weights that other ranks still send
        zeros = [p for p in weights if not p.any()]
        g = make_generator(0, device=x_t.device)
        for p in zeros:
            p.data.normal_(std=0.1, generator=g)
        torch.clear_autocast_cache()  # copies of the weights
        try:
            actual = results(self.model(x_t, t, **cond)[ends], weights)
            expected = eager()
        finally:
            for p in zeros:
                p.data.zero_()
            torch.clear_autocast_cache()
        errors = torch.stack(torch._foreach_norm(torch._foreach_sub(actual, expected)))
        norms = torch.stack(torch._foreach_norm(expected))
        return float((errors / norms.clamp_min(norms.mean() / 100)).max())
