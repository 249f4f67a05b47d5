"""The UNet against the published one's figures, and its laws of precision and memory layout."""

import conftest
import pytest
import torch
from figures import assert_figures, build, filled, inputs, rule_weights, wave

from nanodiff.formats.load import load_run
from nanodiff.formats.published import from_openai, to_openai
from nanodiff.models.unet import UNet, UNetConfig

golden = conftest.golden("unet.json")["cases"]


@pytest.mark.parametrize("case", golden, ids=lambda case: case["name"])
def test_published_weights_and_outputs(case):
    """The config is read from the state dict, the outputs are the published ones, the way back gives the state dict."""
    theirs = rule_weights(case["parameters"])
    config, state_dict = from_openai(theirs, image_size=16, heads=case["config"]["num_heads"])
    for name, value in case["config"].items():
        if name == "attention_resolutions":  # theirs are down-sampling levels by then
            value = [16 // factor for factor in value]
        if isinstance(value, list):
            value = tuple(value)
        assert getattr(config, name) == value, name
    assert config.low_res == (4 if case["cls"] == "SuperResModel" else 0)
    model = UNet(config).eval()
    model.load_state_dict(state_dict, strict=True)
    t = torch.tensor(case["inputs"]["t"])
    y = case["inputs"]["y"] and torch.tensor(case["inputs"]["y"])
    images = {"low_res": wave((2, 3, 4, 4), 1)} if config.low_res else {}
    seen = []  # no block falls back to contiguous tensors, which would copy at every convolution
    for block in [*model.input_blocks, model.middle_block, *model.output_blocks]:
        block.register_forward_hook(lambda m, a, out: seen.append(out.is_contiguous(memory_format=layout)))
    for layout, tolerance in (
        (torch.contiguous_format, 2e-5),
        (torch.channels_last, 5e-5),
    ):
        seen.clear()
        with torch.no_grad():
            x_t = wave((2, 3, 16, 16)).to(memory_format=layout)
            out = model.to(memory_format=layout)(x_t, t, y, **images)
        assert out.dtype == torch.float32
        assert_figures(out, case["forward"], tolerance)
    assert all(seen)
    assert len(seen) == len(model.input_blocks) + 1 + len(model.output_blocks)
    again = to_openai(model.state_dict(), config)
    assert [*again] == [*theirs]
    for key, x in theirs.items():
        assert torch.equal(again[key], x)


def test_heads_on_the_way_up(tmp_path):
    """No tensor shows them: they are told."""
    torch.save(rule_weights(golden[0]["parameters"]), tmp_path / "unet.pt")
    loaded = load_run(f"{tmp_path / 'unet.pt'},image_size=16,num_heads_upsample=2", "cpu")
    t = torch.tensor(golden[0]["inputs"]["t"])
    out = loaded.model(wave((2, 3, 16, 16)), t)
    assert_figures(out, golden[0]["forward_num_heads_upsample_2"])


@pytest.mark.parametrize(
    "size, mult, levels",
    [
        (8, (1, 2), {0}),
        (28, (1, 2, 2), {1, 2}),
        (32, (1, 2, 2, 2), {1, 2}),
        (256, (1, 1, 2, 2, 4, 4), {4, 5}),
    ],
)
def test_shape_by_image_size(size, mult, levels):
    config = UNetConfig.from_depth(1, size, num_heads=4, num_res_blocks=1, in_channels=3, out_channels=3)
    assert config.channel_mult == mult
    assert levels <= config.attention_levels
    if size <= 32:
        x, t, _ = inputs(size=size)
        assert filled(config)(x, t).shape == x.shape


def test_under_bf16_the_first_layer_sees_noise_finer_than_bf16():
    """Black pixels after the first of 4,000 steps: -1 and noise of 0.002, where bf16's spacing is 0.004."""
    model = build("unet")
    x, t, y = inputs()
    conv = model.input_blocks[0][0]
    with torch.no_grad():
        conv.bias.copy_(conv.weight.sum((1, 2, 3)))  # so that -1 gives 0 but at the border
    seen = []
    inside = lambda x: x[..., 1:-1, 1:-1]
    model.input_blocks[1].register_forward_pre_hook(lambda m, args: seen.append(inside(args[0])))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            model(-1 + 0.002 * x, t, y)
    exact, half = seen
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.004, atol=1e-5)
