"""The DiT against the published one's figures and parameter counts, and against its formulas."""

import conftest
import numpy as np
import pytest
import torch
from figures import assert_figures, build, inputs, rule_weights, wave

from nanodiff.formats.published import from_meta, to_meta
from nanodiff.models.dit import DiT, DiTConfig, position_table, timestep_embedding

golden = conftest.golden("dit.json")


def published_state_dict():
    state_dict = rule_weights(golden["parameters"])
    width = golden["config"]["hidden_size"]
    config = DiTConfig(8, 4, 8, 2, width, 2, 4)
    state_dict["pos_embed"] = position_table(config, config.grid, config.grid)[None]  # the rule keeps it
    return state_dict


def published_model():
    config, state_dict = from_meta(published_state_dict(), heads=golden["config"]["num_heads"])
    model = DiT(config)
    model.load_state_dict(state_dict)
    return model


def test_forward_is_the_published_forward():
    x = wave((4, 4, 8, 8))
    t = torch.tensor(golden["inputs"]["t"])
    y = torch.tensor(golden["inputs"]["y"])
    assert_figures(published_model()(x, t, y), golden["forward"], tolerance=1e-5)


def test_export_has_the_published_names_order_and_values():
    sd = published_state_dict()
    config, ours = from_meta(sd, heads=4)
    out = to_meta({key: ours[key] for key in DiT(config).state_dict()}, config)
    assert [[key, list(value.shape)] for key, value in out.items()] == golden["parameters"]
    for name, x in sd.items():
        assert torch.equal(out[name], x)
    out["pos_embed"] = out["pos_embed"] + 0.1
    with pytest.raises(ValueError, match="pos_embed"):
        from_meta(out, heads=4)


@pytest.mark.parametrize("name, count", conftest.golden("unet.json")["dit_parameter_counts"].items())
def test_published_parameter_counts(name, count):
    """Learned variance on 4 latent channels, 1000 classes and the null class; the position table counts, too."""
    sizes = {
        "S": (384, 12, 6),
        "B": (768, 12, 12),
        "L": (1024, 24, 16),
        "XL": (1152, 28, 16),
    }
    patch_size = int(name[-1])
    width, depth, heads = sizes[name[4:-2]]
    config = DiTConfig(32, 4, 8, patch_size, width, depth, heads, num_classes=1000, block="classic")
    with torch.device("meta"):
        model = DiT(config)
    num_params = sum(p.numel() for p in model.parameters())
    assert num_params + position_table(config, config.grid, config.grid).numel() == count
    theirs = to_meta(model.state_dict(), config)
    for key, x in theirs.items():
        if key != "pos_embed":
            theirs[key] = torch.zeros(()).expand(x.shape)  # takes no memory
    assert from_meta(theirs)[0] == config


def test_modern_forward_by_hand():
    """The modern block written out, one image, one head at a time, from the formulas; 3 x 5 tokens, of 4 x 4's area."""
    model = build(depth=1)
    x_t = wave((1, 3, 12, 20))
    _, t, y = inputs(1)
    sd = {k: v.double() for k, v in model.state_dict().items()}
    linear = lambda x, name: x @ sd[f"{name}.weight"].T + sd.get(f"{name}.bias", 0)
    silu = lambda x: x / (1 + torch.exp(-x))
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    patches = [x_t[0, :, i : i + 4, j : j + 4].flatten() for i in range(0, 12, 4) for j in range(0, 20, 4)]
    x = linear(torch.stack(patches).double(), "patch_embed")  # (15, 64)
    x = x + position_table(model.config, 3, 5)
    embedded = timestep_embedding(t, 256)[0].double()
    c = linear(silu(linear(embedded, "t_embed.0")), "t_embed.2") + sd["y_embed.weight"][y[0]]
    s1, m1, g1, s2, m2, g2 = linear(silu(c), "blocks.0.ada").split(64)
    q, k, v = linear(norm(x) * (1 + m1) + s1, "blocks.0.qkv").split(64, dim=1)
    omega = 100.0 ** -(torch.arange(8).double() / 8)
    angles = torch.stack([torch.cat([n // 5 * omega, n % 5 * omega]) for n in range(15)])

    def rotated(u):
        pairs = torch.complex(u[:, :16].contiguous(), u[:, 16:].contiguous())
        return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(1)

    heads = []
    for h in (slice(0, 32), slice(32, 64)):
        scores = rotated(norm(q[:, h])) @ rotated(norm(k[:, h])).T
        heads.append(torch.softmax(scores / 32**0.5, -1) @ v[:, h])
    x = x + g1 * linear(torch.cat(heads, 1), "blocks.0.proj")
    gate, up = linear(norm(x) * (1 + m2) + s2, "blocks.0.fc1").chunk(2, 1)
    x = x + g2 * linear(silu(gate) * up, "blocks.0.fc2")
    shift, scale = linear(silu(c), "final.ada").split(64)
    tokens = linear(norm(x) * (1 + scale) + shift, "final.linear")  # (15, 4 * 4 * 3), channel fastest
    expected = torch.zeros(3, 12, 20)
    for n, token in enumerate(tokens):
        i = n // 5 * 4
        j = n % 5 * 4
        expected[:, i : i + 4, j : j + 4] = token.view(4, 4, 3).permute(2, 0, 1)
    torch.testing.assert_close(model(x_t, t, y)[0], expected, rtol=1e-4, atol=1e-4)


def test_timestep_embedding_tells_fractions_apart():
    """cos then sin of t * 10000^(-i/128); near t = 1000 a step of 1/64 must still move it (in bf16 it could not)."""
    e = timestep_embedding(torch.tensor([999.0, 999.015625]), 256)
    angles = 999.0 * 10000.0 ** -(np.arange(128) / 128)
    expected = np.concatenate([np.cos(angles), np.sin(angles)])
    np.testing.assert_allclose(e[0], expected, atol=2e-4)
    assert e.dtype == torch.float32
    assert (e[0] - e[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "size, patch, shallow",
    [
        (16, 2, 2),
        (28, 2, 2),
        (32, 2, 4),
        (100, 5, 10),
        (250, 10, 25),
        (512, 32, 64),
    ],
)
def test_from_depth(size, patch, shallow):
    channels = dict(in_channels=3, out_channels=3, num_classes=10)
    config = DiTConfig.from_depth(12, size, **channels)
    assert config.width == 768
    assert config.heads == 12
    assert config.patch_size == patch
    assert config.num_tokens == (size // patch) ** 2
    assert config.mlp_hidden == 2048  # 8/3 of the width
    assert DiTConfig.from_depth(4, size, **channels).mlp_hidden % 64 == 0
    assert DiTConfig.from_depth(12, size, **channels, block="classic").mlp_hidden == 4 * 768
    assert DiTConfig.from_depth(5, size, **channels).patch_size == shallow
    assert DiTConfig.from_depth(6, size, **channels).patch_size == patch
    for n in range(size, size + 99):
        patch_size = DiTConfig.from_depth(1, n, **channels).patch_size
        assert n % patch_size == 0
        assert patch_size == 1 or n // patch_size >= 8  # no prime size becomes one token
