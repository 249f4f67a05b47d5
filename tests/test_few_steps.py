"""Guidance in the loss and flow maps: against closed forms, and as whole runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import refused
from test_base_train import TINY, losses, tiny  # noqa: F401 (tiny is a fixture)
from tiny_runs import assert_ranks_agree, assert_resumes, make_data, randomise
from torch.testing import assert_close

from nanodiff.common import make_generator
from nanodiff.conditions import Conditioned
from nanodiff.diffusion.flow import FlowMatching, Training
from nanodiff.diffusion.flow_map import FlowMap
from nanodiff.formats.load import load_run
from nanodiff.formats.start import teach
from nanodiff.models import build
from nanodiff.models.dit import DiT, DiTConfig

SIZES = dict(
    image_size=8,
    in_channels=3,
    out_channels=3,
    patch_size=4,
    width=64,
    heads=4,
)
IMAGES = torch.tensor([[1.0, 0.0], [-1.0, 0.5]])[:, :, None, None]  # a data set of one image per class
NULL = 2
TRAINING = Training(0.0, torch.rand_like)


class Perfect:
    """The velocity of that set; that of a class guided by `scale`."""

    config = Conditioned(num_classes=NULL)

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, x_t, model_t, y):
        t = model_t.view(-1, 1) / 1000
        distance = x_t[:, None] - (1 - t)[:, :, None, None, None] * IMAGES
        squares = distance.flatten(2).square().sum(2)  # (N, 2)
        null = torch.softmax(-squares / (2 * t**2), dim=1)  # how likely each image is where y is NULL
        known = torch.nn.functional.one_hot(y.clamp(max=1), 2).float()
        x0_of = lambda weights: (weights[:, :, None, None, None] * IMAGES).sum(1)  # E[x0 | x_t, y]
        x0 = x0_of(torch.where((y == NULL)[:, None], null, known))
        v = (x_t - x0) / t[:, :, None, None]
        v_null = (x_t - x0_of(null)) / t[:, :, None, None]
        return v_null + self.scale * (v - v_null)


def rows(n=64):
    g = make_generator(0)
    y = torch.randint(0, NULL, (n,), generator=g)
    t = 0.1 + 0.8 * torch.rand(n, generator=g)
    noise = torch.randn(n, 2, 1, 1, generator=g)
    return IMAGES[y], t, noise, y


def test_the_loss_is_least_where_the_model_is_guided():
    """Within the interval that is the guided velocity, elsewhere the data's; and there the gradient points."""
    process = FlowMatching(cfg_scale=3.0, cfg_interval=(0.3, 0.7), guided_from=0.0)
    x0, t, noise, y = rows()
    inside = (t > 0.3) & (t < 0.7)
    guided = process.losses(Perfect(3.0), x0, t, noise, {"y": y}, TRAINING)["loss"]
    plain = process.losses(Perfect(), x0, t, noise, {"y": y}, TRAINING)["loss"]
    assert guided[inside].max() < 1e-8
    assert plain[inside].max() > 1e-3
    assert plain[~inside].max() < 1e-8
    assert guided[~inside].max() > 1e-3
    learned = torch.zeros_like(x0, requires_grad=True)
    perfect = Perfect()

    def model(x_t, t, y):
        is_null = (y == NULL).any()
        return perfect(x_t, t, y) + (0 if is_null else learned)

    model.config = perfect.config
    process.losses(model, x0, t, noise, {"y": y}, TRAINING)["loss"].sum().backward()
    share = t.view(-1, 1, 1, 1)
    x_t = (1 - share) * x0 + share * noise
    added = Perfect(3.0)(x_t, 1000 * t, y) - perfect(x_t, 1000 * t, y)
    assert_close(learned.grad[inside], -added[inside] / 3, rtol=1e-3, atol=1e-4)  # 1 / cfg_scale of it


def test_scale_1_and_unlabelled_rows_have_the_plain_loss():
    x0, t, noise, y = rows()
    guided = FlowMatching(guided_from=0.0)
    plain = FlowMatching().losses(Perfect(2.0), x0, t, noise, {"y": y})["loss"]
    at_scale_1 = guided.losses(Perfect(2.0), x0, t, noise, {"y": y}, TRAINING)["loss"]
    assert torch.equal(at_scale_1, plain)
    y[:] = NULL
    losses = []
    for guided.cfg_scale in (1.0, 5.0):
        losses.append(guided.losses(Perfect(), x0, t, noise, {"y": y}, TRAINING)["loss"])
    assert torch.equal(*losses)


def test_an_untrained_map_is_its_flow_model():
    """Whatever r is; and where all paths are straight, as of a single image, that is the exact map."""
    flow = DiT(DiTConfig(**SIZES, depth=1))
    student = DiT(DiTConfig(**SIZES, depth=1, flow_map=1))
    student.init_weights(make_generator(0))
    torch.nn.init.normal_(student.final.linear.weight, generator=make_generator(1))  # zero would hide all
    shared = {k: v for k, v in student.state_dict().items() if not k.startswith("h_embed")}
    flow.load_state_dict(shared)
    x0, noise = torch.randn(2, 64, 3, 8, 8)
    t = torch.rand(64)
    process = FlowMap("x0")
    process.teacher = SimpleNamespace(process=FlowMatching("x0"), model=flow)
    v = FlowMatching("x0").velocity(flow, x0, t)
    for r in (t, 0 * t, 0.3 * t):
        assert torch.equal(process.velocity(student, x0, t, r), v)
    validation = process.losses(student, x0, t, noise, {})  # is the data's
    assert (validation["loss"] > 0).all()
    used = []
    student.register_forward_pre_hook(lambda _, args: used.append(args[1]))
    reported = process.losses(student, x0, t, noise, {}, TRAINING)["t"]  # for means by quarter of t
    assert torch.equal(1000 * reported, used[-1])
    assert (reported != t).any()
    straight = lambda x_t, t, h=None: (x_t - x0[:1]) / (t.view(-1, 1, 1, 1) / 1000)
    process = FlowMap()
    process.teacher = SimpleNamespace(process=FlowMatching(), model=straight)
    one_image = x0[:1].expand_as(x0)
    exact = process.losses(straight, one_image, t, noise, {}, TRAINING)
    assert (exact["loss"] < 1e-6).all()


@pytest.mark.parametrize("first", [True, 1, 2, 3])
def test_only_the_last_blocks_see_how_far_to_jump(first):
    """The others read x_t alone. A map of an earlier version says True, which is block 1: all see it."""
    model = DiT(DiTConfig(**SIZES, depth=3, flow_map=first))
    model.load_state_dict(randomise(model.state_dict()))
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: outputs.append(output))
    x = torch.randn(2, 3, 8, 8)
    t = torch.rand(2)
    none, zero, far = (model(x, t, h=h) for h in (None, 0 * t, 25 * t))
    assert torch.equal(none, zero)
    assert not torch.equal(zero, far)
    for number in (1, 2, 3):
        assert torch.equal(outputs[2 + number], outputs[5 + number]) == (number < first)


def test_the_teacher_is_asked_for_its_own_classes():
    """By name, whatever their numbers here, and for its own null class."""
    teacher = SimpleNamespace(
        process=FlowMatching(),
        model=Perfect(),
        class_names=["a", "b"],
        why_unguided="",
    )
    vars(teacher).update(source="t", device="cpu")
    process = FlowMap(cfg_scale=3.0)
    teach(process, teacher, Conditioned(num_classes=1), ["b"])
    x = torch.randn(2, 2, 1, 1)
    t = torch.full((2,), 0.5)
    cond = {"y": torch.tensor([0, 1])}
    v = process.teacher_velocity(cond, x, t.view(-1, 1, 1, 1))
    expected = Perfect(3.0)(x, 1000 * t, torch.tensor([1, NULL]))
    assert_close(v, expected)
    asked = (teach, process, teacher, Conditioned(num_classes=2), ["b", "c"])
    refused("'c' of the 2 classes here is not among the 2", *asked)
    refused(r"takes {.y.: .*; the conditions here are {}", teach, process, teacher, Conditioned(), [])


MEAN = 0.5
STD = 0.3
spread = lambda t: ((1 - t) ** 2 * STD**2 + t**2) ** 0.5


def exact_map(x, t, r):
    """Of data N(MEAN, STD^2): the flow keeps the place in units of the deviation."""
    return (1 - r) * MEAN + spread(r) / spread(t) * (x - (1 - t) * MEAN)


def velocity(x, model_t):
    t = (model_t / 1000).view(-1, 1, 1, 1)
    slope = (t - (1 - t) * STD**2) / spread(t) ** 2
    return slope * (x - (1 - t) * MEAN) - MEAN


@pytest.mark.parametrize("shift", [1.0, 1.3, 6.0])
def test_a_jump_is_taught_by_one_that_is_learned_and_a_quarter_shorter(shift):
    """Whatever the shift. And with exact jumps the teacher lands where the flow does: within 1.5%."""
    process = FlowMap(timestep_shift=shift)
    before_shift = lambda t: t / (shift - (shift - 1) * t)
    calls = []
    process.teacher = SimpleNamespace(process=FlowMatching(), model=velocity)

    def exact(x, model_t, h):
        t = model_t.view(-1, 1, 1, 1) / 1000
        r = t - h.view(-1, 1, 1, 1) / 50
        calls.append((before_shift(t), before_shift(r)))
        return (x - exact_map(x, t, r)) / (t - r).clamp(min=1e-9)

    x0 = MEAN + STD * torch.randn(999, 1, 1, 1)
    noise = torch.randn(999, 1, 1, 1)
    spans = torch.tensor([1, 1, 0.8])
    starts = torch.tensor([0, 0, 0.2])  # no jump is short
    training = Training(0.0, lambda like: torch.rand(like.shape) * spans + starts)
    losses = process.losses(exact, x0, torch.rand(999), noise, {}, training)["loss"]
    (start, end), (same_start, near) = calls
    assert torch.equal(start, same_start)
    assert_close(near - end, torch.full_like(end, 1 / 4), rtol=0, atol=1e-4)
    pairs = lambda t, r: {(round(4 * a), round(4 * b)) for a, b in zip(t.flatten().tolist(), r.flatten().tolist())}
    assert {(t, m) for t, m in pairs(start, near) if m < t} <= pairs(start, end)
    assert losses.mean() < 0.0005


def test_the_map_of_gaussian_data():
    """One, two and four jumps have its mean and deviation, and each lands where the flow does."""
    torch.manual_seed(0)
    hidden = [
        torch.nn.Linear(2, 64),
        torch.nn.SiLU(),
        torch.nn.Linear(64, 64),
        torch.nn.SiLU(),
    ]
    layers = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 2))

    def student(x, model_t, h=None, time=None):  # u = a(t, h) x + b(t, h), as the map of Gaussian data is
        h = torch.zeros_like(model_t) if h is None else h
        times = torch.stack([model_t / 1000, h / 50], dim=1)
        a, b = layers(times)[:, :, None, None, None].unbind(1)
        return a * x + b

    process = FlowMap()
    g = make_generator(0)
    process.teacher = SimpleNamespace(process=FlowMatching(), model=velocity)
    adam = torch.optim.Adam(layers.parameters(), lr=5e-3)
    for step in range(1500):
        adam.param_groups[0]["lr"] = 5e-3 * (1 - step / 1500)
        x0 = MEAN + STD * torch.randn(512, 1, 1, 1, generator=g)
        noise = torch.randn(512, 1, 1, 1, generator=g)
        t = torch.rand(512, generator=g)
        rand = lambda like: torch.rand(like.shape, generator=g)
        adam.zero_grad()
        losses = process.losses(student, x0, t, noise, {}, Training(step / 1500, rand))
        losses["loss"].mean().backward()
        adam.step()
    z = torch.linspace(-1.5, 1.5, 9).view(-1, 1, 1, 1)
    with torch.no_grad():
        for t, r in [
            (1.0, 0.0),
            (1.0, 0.5),
            (0.5, 0.0),
            (0.8, 0.3),
        ]:
            x = (1 - t) * MEAN + spread(t) * z
            start = torch.full((9,), t)
            end = torch.full((9,), r)
            landed = x - (t - r) * process.velocity(student, x, start, end)
            assert_close(landed, exact_map(x, t, r), rtol=0, atol=0.03)
        for sampler, steps in (
            ("map", 1),
            ("map", 2),
            ("map", 4),
            ("heun", 20),
        ):
            out = process.sample(student, z, steps, sampler)
            assert out.mean().item() == pytest.approx(MEAN, rel=0.03)
            assert (out.std() / z.std()).item() == pytest.approx(STD, rel=0.03)
        one_step = process.sample(student, z, 1, "euler")
        assert (one_step - exact_map(z, 1.0, 0.0)).abs().max() > 0.3  # what a flow model does in one step


GUIDED = ("--guided_from=0.5", "--cfg_scale=3", "--cfg_interval=0.2,0.8", "--label_drop=0.3")
MAP = ("--objective=flow_map", "--init_from=source", "--cfg_scale=3", "--cfg_interval=0.2,0.8")


@pytest.fixture(params=[GUIDED, MAP], ids=["guided", "map"])
def more(request, tiny, run_script):  # noqa: F811
    if request.param == MAP:
        run_script("base_train", *TINY, "--model_tag=source")
    return request.param


def test_a_resumed_run_is_bit_identical(tiny, run_script, more):  # noqa: F811
    assert_resumes(tiny, run_script, *TINY, *more, "--device_batch_size=8")


def test_a_resumed_map_keeps_the_block_from_which_it_sees_jumps(tiny, run_script, monkeypatch):  # noqa: F811
    deeper = (*TINY, "--depth=3", "--width=64", "--num_iterations=2")
    run_script("base_train", *deeper, "--model_tag=source")
    its_map = (*deeper, *MAP, "--model_tag=map")
    with monkeypatch.context() as patch:
        make = build.make_model_config
        patch.setattr(build, "make_model_config", lambda *args: replace(make(*args), flow_map=True))  # as it was once
        run_script("base_train", *its_map, "--num_iterations=1")
    done = run_script("base_train", *its_map, "--resume=changed")
    assert done["raw_model"].config.flow_map == 1
    assert load_run("map", torch.device("cpu")).model.config.flow_map == 1
    assert run_script("base_train", *its_map, "--model_tag=new")["raw_model"].config.flow_map == 3


def test_a_map_keeps_its_teacher_when_that_is_trained_on(tiny, run_script):  # noqa: F811
    source = (*TINY, "--model_tag=source")
    its_map = (*TINY, *MAP, "--model_tag=map", "--num_iterations=1")
    run_script("base_train", *source)
    teacher = run_script("base_train", *its_map)["teacher"]
    run_script("base_train", *source, "--num_iterations=9", "--resume=changed", "--save_every=1")  # prunes others
    assert run_script("base_train", *its_map)["teacher"] == teacher


@pytest.mark.slow
def test_two_ranks_train_the_same_model_as_one(tiny, run_script, more):  # noqa: F811
    assert_ranks_agree(tiny, run_script, *TINY, *more, "--eval_every=-1")


def test_guidance_in_the_loss_starts_where_it_should(tiny, run_script):  # noqa: F811
    """Until then the run is the plain one, bit for bit; and a validation loss is plain to the end."""
    run_script("base_train", *TINY, "--model_tag=plain", "--cfg_scale=3")
    saves = ("--save_every=3", "--checkpoints_kept=-1")
    guided_run = (*TINY, "--model_tag=guided", "--cfg_scale=3", "--guided_from=0.5", *saves)
    run_script("base_train", *guided_run)
    plain = losses(tiny, "plain")
    guided = losses(tiny, "guided")
    assert guided[:3] == plain[:3]
    assert guided[3] != plain[3]
    assert load_run("guided", "cpu", "3").why_unguided == ""
    assert load_run("guided", "cpu", "6").why_unguided != ""
    run_script("base_train", *TINY, "--model_tag=copy", "--init_from=guided", "--num_iterations=0")
    assert load_run("copy", "cpu").why_unguided
    make_data("plain", class_names=())
    done = run_script("base_train", *TINY, "--model_tag=unguided", "--init_from=guided", "--data=plain")
    assert done["guided_from"] == 1  # without classes there is nothing to be guided to
    longer = ("--num_iterations=60", "--resume=changed")
    refused("has learned guidance by step 6", run_script, "base_train", *guided_run, *longer)


def test_samples_of_both_are_unguided_by_default(tiny, run_script, more, capsys):  # noqa: F811
    """Any cfg_scale draws the same images, and one line says why; a map takes four jumps, and Heun's steps too."""
    run_script("base_train", *TINY, *more, "--model_tag=learned", "--save_every=0")
    loaded = load_run("learned", "cpu")
    capsys.readouterr()
    images = loaded.sample(num_images=2, cfg_scale=7.0)
    assert "has learned guidance" in capsys.readouterr().out
    assert (images == loaded.sample(num_images=2, cfg_scale=1.0)).all()
    assert capsys.readouterr().out == ""
    if more == MAP:
        assert (images == loaded.sample(num_images=2, steps=4, sampler="map")).all()
        assert (images != loaded.sample(num_images=2, steps=4, sampler="heun")).any()
    args = (*TINY, *more, "--model_tag=learned", "--save_every=0", "--cfg_scale=5", "--resume=changed")
    refused("cfg_scale=5.0 .was 3.0", run_script, "base_train", *args)  # it is learned
