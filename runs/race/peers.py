"""
Train another project's model with its own code for a while, then draw samples with its own sampler. For runs/race.sh:

    python runs/race/peers.py PEER CLONE IMAGES SECONDS RATE OUT        makes OUT_25.npz, and OUT_published.npz if asked
    python runs/race/peers.py PEER CLONE IMAGES SECONDS RATE            trains only, and prints the later half's loss

No line of theirs is here. Their script runs in a namespace. A hook on the optimizer ends it when the time is over,
counted from the start of this process. Model and sampler are taken from it at that moment. Each peer's function
says what is changed for a CPU and 32 px.
"""

import time

START = time.monotonic()  # before any import: those count

import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from argparse import Namespace  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402

NUM_IMAGES = int(os.environ.get("RACE_IMAGES", 500))
BATCH = 50  # of samples
TRAIN_BATCH = int(os.environ.get("RACE_BATCH", 64))  # the most images per step: published batches were for GPUs
IS_TRIAL = len(sys.argv) == 6  # no OUT
SEED = int(os.environ.get("RACE_SEED", 0))
PUBLISHED = "published" in os.environ.get("RACE_EVALUATIONS", "25")  # also their published number of evaluations


class TimeIsUp(BaseException):
    """Not an Exception, so that no handler of theirs swallows it."""


class Clock:
    """Ends the training when another step would not fit; counts the steps, keeps the losses."""

    def __init__(self, seconds: float, rate: float | None = None):
        self.seconds = seconds
        self.rate = rate  # for scripts that hard-code theirs
        self.steps = 0
        self.last = START
        self.losses = []  # of each backward pass
        backward = torch.Tensor.backward

        def recorded(loss, *given, **more):
            self.losses.append(loss.detach())
            return backward(loss, *given, **more)

        torch.Tensor.backward = recorded
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, args, kwargs):
        if self.rate is not None and self.steps == 0:
            for group in optimizer.param_groups:
                group["lr"] = self.rate

    def after(self, optimizer, args, kwargs):
        now = time.monotonic()
        step_seconds = now - self.last if self.steps else 0.0  # the first includes the start
        self.steps += 1
        self.last = now
        if now - START + step_seconds > self.seconds:
            if IS_TRIAL:
                half = self.losses[len(self.losses) // 2 :]
                print(f"\n{float(torch.stack(half).float().mean()):.6f} after {self.steps} steps")
                sys.exit()
            seconds = f"{now - START:.0f} s of {self.seconds:.0f}"
            print(f"\n{self.steps} steps at rate {self.rate:g} in {seconds}, start included", flush=True)
            raise TimeIsUp


def run_until_time_is_up(work) -> dict:
    """The local variables of each function that work() was in when the time was over, by the function's name."""
    try:
        work()
    except TimeIsUp as stop:
        frames = {}
        traceback = stop.__traceback__
        while traceback:
            frame = traceback.tb_frame
            frames.setdefault(frame.f_code.co_name, frame.f_locals)
            traceback = traceback.tb_next
        return frames
    raise SystemExit("error: the training ended by itself before its time was over")


def run_script(path: Path, *arguments: str, optimize: int = -1, name: str = "__main__") -> dict:
    """Run a Python file as `python path arguments`. optimize=1 drops its assertions. Returns its globals."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    names = {"__name__": name, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec", optimize=optimize), names)
    return names


def in_batches(draw) -> np.ndarray:
    """draw(n) -> (n, 3, 32, 32) in [0, 1]; NUM_IMAGES of them as (N, 32, 32, 3) uint8."""
    with torch.autocast("cpu", dtype=torch.bfloat16):  # 1.4 to 2 times as fast as fp32
        parts = [draw(min(BATCH, NUM_IMAGES - i)) for i in range(0, NUM_IMAGES, BATCH)]
    images = torch.cat([part.detach().float().cpu() for part in parts])
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def balanced_classes() -> torch.Tensor:
    return torch.arange(NUM_IMAGES) % 10


# ---------------------------------------------------------------------------------------------------------------------
# Each returns ({"25" or "published": images}, labels or None)


def minrf(clone: Path, images: Path, clock: Clock):
    """rf.py --cifar. Changed: .cuda() does nothing; CIFAR-10 is an array of IMAGES; no wandb; a hook sets the rate;
    batches of at most TRAIN_BATCH for its 256."""
    import torchvision

    loader = torch.utils.data.DataLoader
    torch.utils.data.DataLoader = lambda *given, batch_size, **more: loader(
        *given, batch_size=min(batch_size, TRAIN_BATCH), **more
    )

    class Cifar(torch.utils.data.Dataset):
        def __init__(self, root, train, download, transform):
            from PIL import Image

            arrays = np.load(images / "train.npz")
            self.images = [Image.fromarray(image) for image in arrays["images"]]
            self.labels = arrays["labels"].tolist()
            self.transform = transform

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            return self.transform(self.images[i]), self.labels[i]

    torchvision.datasets.CIFAR10 = Cifar
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    os.environ["WANDB_MODE"] = "disabled"
    os.mkdir("contents")
    frames = run_until_time_is_up(lambda: run_script(clone / "rf.py", "--cifar"))
    flow = frames["<module>"]["rf"]
    flow.model.eval()
    labels = balanced_classes()

    def sample(steps, guided):
        classes = iter(labels.split(BATCH))

        def draw(n):
            y = next(classes)
            null = torch.full_like(y, 10) if guided else None
            return flow.sample(torch.randn(n, 3, 32, 32), y, null, steps)[-1] * 0.5 + 0.5

        return in_batches(draw)

    drawn = {"25": sample(25, False)}
    if PUBLISHED:
        drawn["published"] = sample(50, True)  # guidance 2, so 100 evaluations
    return drawn, labels


def denoising_diffusion_pytorch(clone: Path, images: Path, clock: Clock):
    """The README's Trainer, at 32 px and in bf16. Nothing of it is changed; DDIM is its own."""
    sys.path.insert(0, str(clone))
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    model = Unet(dim=64, dim_mults=(1, 2, 4, 8), flash_attn=True)
    diffusion = GaussianDiffusion(model, image_size=32, timesteps=1000, sampling_timesteps=25)
    trainer = Trainer(
        diffusion,
        str(images / "folder"),
        train_batch_size=32,
        train_lr=clock.rate,
        gradient_accumulate_every=2,
        ema_decay=0.995,
        amp=True,
        mixed_precision_type="bf16",
        calculate_fid=False,
        save_and_sample_every=10**9,
    )
    run_until_time_is_up(trainer.train)
    sampler = trainer.ema.ema_model.eval()
    drawn = {}
    for name, steps in {"25": 25, "published": 250}.items():
        if name == "25" or PUBLISHED:
            sampler.sampling_timesteps = steps
            drawn[name] = in_batches(lambda n: sampler.sample(batch_size=n))
    return drawn, None


def diffusers(clone: Path, images: Path, clock: Clock):
    """examples/unconditional_image_generation/train_unconditional.py, its defaults at 32 px, in bf16, with its average.
    Changed: 25 evaluations by DDIM, since the script's DDPM wants 1,000."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(images / "cache"))
    script = clone / "examples" / "unconditional_image_generation" / "train_unconditional.py"
    arguments = ["--resolution=32", "--center_crop", "--random_flip", "--use_ema", "--mixed_precision=bf16"]
    arguments += [f"--train_data_dir={images / 'folder'}", f"--learning_rate={clock.rate}", "--output_dir=out"]
    arguments += ["--checkpointing_steps=1000000000", "--save_images_epochs=1000000"]
    frames = run_until_time_is_up(lambda: run_script(script, *arguments))
    from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline

    held = frames["main"]
    model, schedule = held["accelerator"].unwrap_model(held["model"]), held["noise_scheduler"]
    held["ema_model"].copy_to(model.parameters())
    model.eval()
    few = DDIMPipeline(unet=model, scheduler=DDIMScheduler.from_config(schedule.config))
    drawn = {"25": in_batches(lambda n: pipeline_images(few, n, 25))}
    if PUBLISHED:
        many = DDPMPipeline(unet=model, scheduler=schedule)
        drawn["published"] = in_batches(lambda n: pipeline_images(many, n, 1000))
    return drawn, None


def pipeline_images(pipeline, n: int, steps: int) -> torch.Tensor:
    images = pipeline(batch_size=n, num_inference_steps=steps, output_type="np").images
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def improved_diffusion(clone: Path, images: Path, clock: Clock):
    """scripts/image_train.py with the README's flags for CIFAR-10, L_hybrid. Changed: mpi4py is a stub for one process;
    batches of at most TRAIN_BATCH for 128. Raw weights: the average of 0.9999 needs tens of thousands of steps."""
    mpi4py = ModuleType("mpi4py")
    mpi4py.MPI = Namespace()
    mpi4py.MPI.COMM_WORLD = Namespace(
        rank=0, size=1, Get_rank=lambda: 0, Get_size=lambda: 1, bcast=lambda value, root=0: value
    )
    sys.modules["mpi4py"] = mpi4py
    os.environ["OPENAI_LOGDIR"] = os.getcwd()
    sys.path.insert(0, str(clone))
    network = "--image_size=32 --num_channels=128 --num_res_blocks=3 --learn_sigma=True --dropout=0.3".split()
    process = "--diffusion_steps=4000 --noise_schedule=cosine".split()
    training = [f"--batch_size={min(128, TRAIN_BATCH)}", f"--lr={clock.rate}", f"--data_dir={images / 'folder'}"]
    script = clone / "scripts" / "image_train.py"
    frames = run_until_time_is_up(lambda: run_script(script, *network, *process, *training))
    model = frames["run_loop"]["self"].model.eval()
    from improved_diffusion.script_util import create_gaussian_diffusion

    def sample(respacing, method):
        spaced = create_gaussian_diffusion(
            steps=4000, learn_sigma=True, noise_schedule="cosine", timestep_respacing=respacing
        )
        loop = getattr(spaced, method)
        return in_batches(lambda n: loop(model, (n, 3, 32, 32), clip_denoised=True) / 2 + 0.5)

    drawn = {"25": sample("ddim25", "ddim_sample_loop")}
    if PUBLISHED:
        drawn["published"] = sample("", "p_sample_loop")
    return drawn, None


def dit(clone: Path, images: Path, clock: Clock):
    """train.py with its smallest model of 64 tokens, DiT-S/4, on pixels. Changed: gloo and the CPU stand in for NCCL
    and a GPU; the autoencoder returns its input; 3 channels for 4; no enlargement to 256 px; a hook sets the rate;
    assertions (CUDA) are off; two workers; batches of at most TRAIN_BATCH for 256. Raw weights: the average of 0.9999
    needs tens of thousands of steps."""

    class Device:
        def __rmod__(self, rank):
            return "cpu"

    class Pixels:
        """Stands in for AutoencoderKL: the script multiplies what it gets by 0.18215."""

        @classmethod
        def from_pretrained(cls, name):
            return cls()

        def to(self, device):
            return self

        def encode(self, x):
            return Namespace(latent_dist=Namespace(sample=lambda: x / 0.18215))

    autoencoders = ModuleType("diffusers.models")
    autoencoders.AutoencoderKL = Pixels
    sys.modules["diffusers"], sys.modules["diffusers.models"] = ModuleType("diffusers"), autoencoders
    gloo, parallel = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group = lambda backend: gloo("gloo")
    torch.nn.parallel.DistributedDataParallel = lambda model, device_ids: parallel(model)
    torch.cuda.device_count = Device
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    names = run_script(clone / "train.py", optimize=1, name="train")
    shape = names["DiT_models"]["DiT-S/4"]
    names["DiT_models"]["DiT-S/4"] = lambda **more: shape(in_channels=3, **more)
    names["center_crop_arr"] = lambda image, size: image
    settings = Namespace(
        data_path=str(images / "folder"),
        results_dir="results",
        model="DiT-S/4",
        image_size=256,  # / 8 = 32, the side of what the autoencoder would return
        num_classes=10,
        epochs=1400,
        global_batch_size=min(256, TRAIN_BATCH),
        global_seed=SEED,
        vae="ema",
        num_workers=2,
        log_every=100,
        ckpt_every=50_000,
    )
    frames = run_until_time_is_up(lambda: names["main"](settings))
    model = frames["main"]["model"].module.eval()
    labels = balanced_classes()

    def sample(steps):
        process, classes = names["create_diffusion"](str(steps)), iter(labels.split(BATCH))

        def draw(n):
            given = dict(y=next(classes))
            loop = process.p_sample_loop
            return loop(model, (n, 3, 32, 32), clip_denoised=False, model_kwargs=given, device="cpu") / 2 + 0.5

        with torch.no_grad():
            return in_batches(draw)

    drawn = {"25": sample(25)}
    if PUBLISHED:
        drawn["published"] = sample(250)
    return drawn, labels


PEERS = {
    "minRF": minrf,
    "denoising-diffusion-pytorch": denoising_diffusion_pytorch,
    "diffusers": diffusers,
    "improved-diffusion": improved_diffusion,
    "DiT": dit,
}


def main(peer, clone, images, seconds, rate, out=""):
    clone, images, out = Path(clone).resolve(), Path(images).resolve(), Path(out).resolve()
    clock = Clock(float(seconds), float(rate))
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)  # where they leave their logs
        drawn, labels = PEERS[peer](clone, images, clock)
        os.chdir(out.parent)
    for evaluations, samples in drawn.items():
        more = {} if labels is None else {"arr_1": labels.numpy()}
        np.savez(f"{out}_{evaluations}.npz", arr_0=samples, **more)


if __name__ == "__main__":
    main(*sys.argv[1:])
