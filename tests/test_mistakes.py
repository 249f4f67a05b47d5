"""A user's mistake gets one line that names it and exit code 2, and leaves nothing half-written."""

import gc
import shutil

import numpy as np
import pytest
import torch
from conftest import refused
from image_helpers import make_folder
from tiny_runs import TINY, make_autoencoder, make_data

from nanodiff.common import UserError, excepthook
from nanodiff.png import encode_png

TRAIN = ("base_train", *TINY)
UNET = ("base_train", *(arg for arg in TINY if "patch_size" not in arg), "--arch=unet")
EPS = ("--objective=eps", "--num_timesteps=20")
LORA = (*TRAIN, "--init_from=flow", "--lora_rank=2")
SAMPLE = ("sample", "--device_type=cpu", "--num_images=2", "--steps=1", "--model=flow")
GIVEN = (*SAMPLE, "--from_images=s.npz")
EVAL = ("base_eval", "--device_type=cpu")
EXPORT = ("export", "--model=flow")
PREPARE = ("prepare_data", "--workers=1")
BUCKETS = (*PREPARE, "--path=images", "--name=x", "--aspect_buckets")
CACHE = ("cache_latents", "--device_type=cpu", "--data=tiny", "--autoencoder=vae")


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    """The base folder and current folder: a set, runs of one step, and files that are wrong in many ways."""
    root = shutil.copytree(made, tmp_path_factory.mktemp("place"), dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANODIFF_BASE_DIR", str(root))
        patch.chdir(root)
        (root / "runs" / "empty" / "checkpoints").mkdir(parents=True)
        (root / "file").write_text("no folder")
        np.savez(root / "objects.npz", arr_0=np.array([{}], dtype=object))
        make_data("unlabelled", class_names=())
        make_data("alone", class_names=(), val=0)
        np.savez(root / "s.npz", np.zeros((12, 16, 16, 3), np.uint8))
        np.savez(root / "colourless.npz", np.zeros((12, 16, 16, 1), np.uint8))
        np.savez(root / "noted.npz", arr_0=np.zeros((12, 16, 16, 3), np.uint8), protocol="ddim")
        np.savez(root / "small.npz", np.zeros((2, 8, 8, 3), np.uint8), [0, 8])
        np.save(root / "gray.npy", np.zeros((2, 8, 20), np.uint8))
        np.savez(root / "floats.npz", np.linspace(0, 1, 12 * 768).reshape(12, 16, 16, 3))
        np.savez(root / "odd.npz", np.zeros((2, 5, 5, 3), np.uint8))
        (root / "text.png").write_text("no image")
        (root / "black.png").write_bytes(encode_png(np.zeros((16, 16, 3), np.uint8)))
        make_folder(root / "images")
        make_autoencoder(root / "vae")
        flat = ("pos_embed", "x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.mlp.fc1.weight")
        torch.save({name: torch.zeros(1) for name in flat}, root / "flat.pt")  # almost a published model
        yield root


MISTAKES = [
    # settings
    ((*TRAIN, "--num_iterations=-1", "--target_param_data_ratio=-1"), "no horizon"),
    ((*TRAIN, "--num_epochs=1", "--target_param_data_ratio=3"), "num_epochs and target_param_data_ratio are given"),
    ((*TRAIN, *EPS, "--sample_steps=21", "--sample_every=0"), "'21': 21 timesteps of 20; accepted: 1 to 20"),
    ((*TRAIN, *EPS, "--sampler=heun", "--sample_every=0"), "sampler='heun'"),
    ((*TRAIN, *EPS, "--objective=x_prev", "--sample_steps=10", "--sample_every=0"), "accepted: 20"),
    ((*SAMPLE, "--sampler=ddim"), "auto, euler, heun, ralston, sde"),
    ((*SAMPLE, "--n=4"), "nearest: num_images;"),
    ((*SAMPLE, "--respacing=ddim10", "--steps=0"), "respacing='ddim10'"),
    ((*SAMPLE, "--model=eps", "--respacing=60", "--steps=0"), "60 timesteps of 50"),
    ((*SAMPLE, "--model=eps", "--respacing=5,0", "--steps=0"), "respacing='5,0'; accepted: "),
    ((*SAMPLE, "--model=eps", "--respacing=10"), "steps and respacing both"),
    ((*TRAIN, *EPS, "--num_timesteps=10", "--noise_schedule=linear"), "num_timesteps=10 has betas outside (0, 1)"),
    ((*SAMPLE, "--model=eps", "--sampler=ddpm", "--eta=0.5"), "eta=0.5 with sampler=ddpm"),
    ((*TRAIN, "--cfg_interval=0.3,1.5", "--sample_every=0"), "0.3,1.5"),
    ((*TRAIN, "--low_res_size=16"), "low_res_size=16"),
    ((*UNET, "--attention_resolutions=a"), "attention_resolutions"),
    ((*TRAIN, "--guided_from=0.5", "--label_drop=0"), "needs classes, vectors or second images"),
    ((*TRAIN, "--guided_from=0.5", "--cfg_scale=1"), "cfg_scale > 1"),
    ((*TRAIN, "--objective=flow_map"), "flow_map tunes a flow run"),
    ((*UNET, "--objective=flow_map"), "flow map needs arch=dit"),
    ((*TRAIN, "--num_epochs=2", "--num_iterations=0"), "num_iterations and num_epochs are given"),
    ((*TRAIN, "--warmup_ratio=0.6", "--warmdown_ratio=0.5"), "must not sum to more than 1"),
    # settings that would do nothing
    ((*TRAIN, "--init_from=flow", "--objective=flow_map", "--t_range=0,0.5"), "accepted: no timesteps, "),
    ((*EVAL, "--metric=fid", "--samples=s.npz", "--data=tiny", "--cfg_scale=4"), 'only samples="" uses it'),
    ((*SAMPLE, "--lora_scale=0.5"), "lora_scale=0.5 would do nothing"),
    ((*SAMPLE, "--model=flat.pt", "--ema=raw"), "ema=raw is no option of "),
    ((*TRAIN, "--objective=eps", "--timestep_shift=3"), "timestep_shift"),
    # data sets
    ((*TRAIN, "--data=unheard"), "unheard"),
    # runs
    ((*TRAIN, "--model_tag=flow", "--resume=never"), "resume=never"),
    ((*TRAIN, f"--model_tag={'x' * 300}"), "model_tag"),
    ((*TRAIN, "--model_tag=.."), "model_tag='..'"),
    ((*TRAIN, "--model_tag=flow,step=1"), "model_tag='flow,step=1'"),  # run flow at step 1
    ((*TRAIN, "--device_batch_size=3"), "total_batch_size=8 is not a multiple of device_batch_size"),
    ((*SAMPLE, f"--model={'x' * 300}"), "xxx"),
    ((*SAMPLE, "--model=~nobody/x"), "~nobody/x"),
    ((*SAMPLE, "--model=empty"), "empty"),
    ((*SAMPLE, "--model=flow,step=1", "--checkpoint_step=2"), "step is given twice: 2, and 1 behind flow"),
    ((*SAMPLE, "--out=file/x"), "see out"),
    ((*SAMPLE, "--model=flat.pt"), "flat.pt"),
    ((*EVAL, "--model=plain", "--metric=loss", "--data=alone"), "'val'"),
    ((*EVAL, "--model=plain", "--metric=class_accuracy"), "class_accuracy"),
    ((*EVAL, "--model=flow", "--metric=bpd"), "bpd"),
    ((*EVAL, "--metric=fid", "--samples=s.npz", "--data=large"), "(3, 32, 32), s.npz (3, 16, 16)"),
    ((*EVAL, "--metric=fid", "--samples=colourless.npz", "--data=tiny"), "(3, 16, 16), colourless.npz (1, 16, 16)"),
    ((*EVAL, "--metric=fid", "--samples=noted.npz", "--data=tiny"), "noted.npz's protocol is damaged"),
    ((*EVAL, "--model=flow", "--metric=fid", "--samples=s.npz", "--data=tiny"), "model='flow' would do nothing"),
    ((*EVAL, "--model=flow", "--metric=fid", "--steps=5,x"), "steps='5,x'; accepted: a whole number"),
    ((*EVAL, "--model=flow", "--metric=fid", "--num_images=9"), "needs 10 images or more, got 9"),
    ((*EVAL, "--metric=fd_classifier", "--samples=s.npz", "--data=unlabelled"), "labels of 2 or more classes"),
    ((*EVAL, "--metric=class_accuracy", "--samples=s.npz", "--data=tiny"), "s.npz has no classes"),
    ((*EVAL, "--metric=fid", "--samples=absent"), "no such file: absent"),
    ((*EVAL, "--metric=fid", "--samples=runs/empty"), "no images in"),
    ((*EVAL, "--metric=fid", "--samples=floats.npz", "--data=tiny"), "uint8"),
    ((*EVAL, "--model=flow", "--metric=well_formed"), "data='tiny'; accepted: shapes, shapes32, shapes64"),
    (("sample_web", "--model=b"), "nearest tags: "),
    (("report", "empty"), "empty/config.json"),
    (("report", "cifar10"), "cifar10.safetensors is a file, without a log; accepted: a run"),
    # adapters
    ((*LORA, "--init_from="), "lora_rank=2 needs --init_from"),
    ((*LORA, "--autoencoder=vae"), "the data have resolution 4, the model wants 16"),
    ((*LORA, "--data=large"), "the data have resolution 32, the model wants 16"),
    ((*LORA, "--t_range=0.8,0.5"), "t_range='0.8,0.5'; accepted: two numbers"),
    ((*LORA, "--trainable=final"), "trainable='final' with lora_rank"),
    ((*LORA, "--objective=flow_x0"), "objective='flow_x0' with lora_rank"),
    # what is asked of samples
    ((*SAMPLE, "--num_images=257"), "num_images=257: a grid shows 256; --npz keeps more"),
    ((*SAMPLE, "--classes=ring,rig"), "classes: 'rig' is unknown; there are 8 classes; accepted: circle, ring"),
    ((*SAMPLE, "--model=plain", "--classes=1"), "classes: '1' is unknown; there are no classes"),
    ((*SAMPLE, "--classes=ring\nbar"), "classes: 'ring bar' is unknown"),
    ((*SAMPLE, "--autoencoder=vae"), "autoencoder='vae': the model is of images, not of latents"),
    ((*SAMPLE, "--out=."), "is a folder, or no PNG; accepted: the path of a file"),
    ((*SAMPLE, "--low_res=val"), "low_res='val' would do nothing: "),
    ((*SAMPLE, "--model=sr", "--low_res=odd.npz"), "(3, 8, 8) or (3, 16, 16)"),
    ((*SAMPLE, "--model=sr", "--low_res=small.npz"), "has class 8, the model 8 classes"),
    ((*SAMPLE, "--vectors=s.npz"), "trained without vectors"),
    ((*SAMPLE, "--from_images=absent"), "absent' is missing, or none of these: an .npz file, a folder"),
    ((*SAMPLE, "--from_images=gray.npy"), "(1, 16, 16); accepted: (3, 16, 16)"),
    ((*SAMPLE, "--from_images=text.png"), "text.png': no image in a format of"),
    ((*SAMPLE, "--from_images=file"), "file' is missing, or none of these"),
    ((*SAMPLE, "--from_images=floats.npz"), "holds float64; accepted: uint8"),
    ((*GIVEN, "--mask=text.png"), "text.png is no image"),
    ((*GIVEN, "--mask=black.png"), "black.png' keeps nothing"),
    ((*GIVEN, "--size=16x32"), "size='16x32' with from_images"),
    ((*SAMPLE, "--strength=0.2"), "would do nothing without from_images"),
    # exports
    ((*EXPORT, "--form=meta"), "accepted: form=meta for dit_classic with classes"),
    ((*EXPORT, "--form=openai"), "form=openai for unet"),
    ((*EXPORT, "--out=model.pt"), "model.pt"),
    ((*EXPORT, "--lora=a.safetensors"), "without out"),
    ((*EXPORT, "--out=file/x.safetensors"), "File exists: file;"),
    # preparing data
    (PREPARE, "path"),
    ((*PREPARE, "--source=shapes", "--name=shapes32"), "'shapes32' is an embedded set"),
    ((*PREPARE, "--path=objects.npz"), "objects.npz"),
    ((*PREPARE, "--source=shapes", "--name=tiny"), "tiny"),
    (BUCKETS, "resolution=0; accepted with aspect_buckets: multiples of 16"),
    ((*BUCKETS, "--path=", "--source=shapes", "--resolution=16"), "aspect_buckets=True is for image files"),
    ((*CACHE, "--autoencoder="), "give --data=NAME of an image set and --autoencoder=PATH"),
    ((*CACHE, "--autoencoder=nowhere"), "no such file: nowhere"),
    ((*CACHE, "--name=tiny", "--overwrite"), "name='tiny' is the set that is read"),
]


def whole(root):
    """What a mistake must not touch: data sets, checkpoints, and the files beside them."""
    kept = [
        *root.glob("*"),
        *root.glob("data/*/*"),
        *root.glob("runs/*/checkpoints/*/*"),
    ]
    return sorted((str(p), p.stat().st_size if p.is_file() else None) for p in kept)


def mistake_name(value):
    return " ".join(value[-2:]) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=mistake_name)
def test_a_mistake_is_one_line_and_leaves_nothing(place, run_script, capsys, arguments, named):
    before = whole(place)
    try:
        run_script(*arguments)
        pytest.fail("nothing was wrong?")
    except UserError as e:  # which the excepthook prints after "error: "
        message = f"error: {e}"
        code = 2
    except OSError as e:
        with pytest.raises(SystemExit) as end:
            excepthook(type(e), e, None)
        message = capsys.readouterr().err.strip()
        code = end.value.code
    except SystemExit as e:
        message = capsys.readouterr().err.strip()
        code = e.code
    gc.collect()  # the frames of the error hold the run's lock, as the process would until its end
    assert code == 2, message
    assert message.startswith("error: "), message
    assert "\n" not in message, message
    assert named in message, message
    assert whole(place) == before
    assert not list(place.rglob(".tmp*"))


def test_a_base_folder_that_cannot_be_written(place, run_script, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(place / "file" / "under"))
    for arguments in (
        (*TRAIN, "--data=shapes"),
        (*PREPARE, "--source=shapes", "--name=mine"),
    ):
        refused("under", run_script, *arguments)
