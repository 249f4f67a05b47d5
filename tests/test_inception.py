"""The FID network equals the published one's figures, and resizes as TensorFlow 1 does; its weights are checked."""

import hashlib
from unittest.mock import Mock

import pytest
import torch
from conftest import golden, refused
from figures import assert_figures, rule_weights, wave
from torch.testing import assert_close

from nanodiff.metrics import inception

PUBLISHED = golden("inception.json")


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_layers_equal_torch_fidelity(size):
    weights = rule_weights(PUBLISHED["parameters"], 1.5, PUBLISHED["salt"])
    model = inception.Inception(weights).eval()
    model.load_state_dict(weights)
    x = 127.5 + wave((2, 3, size, size), 0, 127.5, PUBLISHED["salt"])
    x = x.round().clamp(0, 255).byte().numpy()
    layers = {}
    for name, module in (
        ("64", model.Conv2d_3b_1x1),
        ("192", model.Mixed_5b),
        ("768", model.Mixed_7a),
    ):
        module.register_forward_pre_hook(lambda module, x, name=name: layers.update({name: x[0].mean((2, 3))}))
    gray = x[:, :1]
    assert_close(model.features(gray), model.features(gray.repeat(3, 1)))  # equal channels
    layers["2048"], layers["logits"] = model.features(x)
    for name, figures in PUBLISHED["features"][f"{size} px"].items():
        assert_figures(layers[name.removesuffix("_unbiased")], figures)


def test_resize_follows_tensorflow_1():
    # 2 -> 4 pixels: read at 0, 0.5, 1, 1.5, the last one past the edge: that is TensorFlow's known shift to a side.
    x = torch.tensor([[0.0, 8.0], [16.0, 24.0]])[None, None]
    expected = torch.tensor(
        [
            [0, 4, 8, 8],
            [8, 12, 16, 16],
            [16, 20, 24, 24],
            [16, 20, 24, 24],
        ]
    ).float()
    assert_close(inception.resize(x, 4)[0, 0], expected)
    x = torch.rand(1, 3, 6, 6)
    assert_close(inception.resize(x, 6), x)  # the same size: nothing to do
    assert_close(inception.resize(x, 3), x[:, :, ::2, ::2])  # half of it: every other pixel, not smoothed


def test_weights_are_downloaded_once_and_checked_or_it_is_said_where_to_put_them(tmp_path, monkeypatch):
    """By a smaller network, and a file without counters, as old torch wrote it."""
    published = tmp_path / "published.pth"
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(inception, "Inception", lambda weights: inception.conv_bn_relu(3, 8, 3))
    weights = {name: x for name, x in inception.Inception({}).state_dict().items() if x.ndim}
    torch.save(weights, published)
    monkeypatch.setattr(inception, "NUM_BYTES", published.stat().st_size)
    monkeypatch.setattr(inception, "SHA256", hashlib.sha256(published.read_bytes()).hexdigest())
    urlopen = Mock(side_effect=lambda url, timeout: open(published, "rb"))
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for model in (inception.load_inception(path, "cpu") for path in ("", "", published)):
        assert not model.training
        for key, value in weights.items():
            assert torch.equal(model.state_dict()[key], value)
    (call,) = urlopen.call_args_list
    assert call.args[0] == inception.URL
    monkeypatch.setattr(inception, "SHA256", "0" * 64)
    refused("not the published file", inception.load_inception, published, "cpu")
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: open(tmp_path / "no route"))
    refused(f"{inception.URL}.*{tmp_path / 'elsewhere' / inception.FILE_NAME}", inception.load_inception, "", "cpu")
