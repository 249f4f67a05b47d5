"""A classic DiT in the format of diffusers (github.com/huggingface/diffusers), for its DiTTransformer2DModel."""

from nanodiff.common import UserError
from nanodiff.models.dit import DiTConfig

KEYS = (  # ours, theirs, replaced in this order; every other part of a name is the same
    (".proj.", ".attn1.to_out.0."),
    (".fc1.", ".ff.net.0.proj."),
    (".fc2.", ".ff.net.2."),
    ("final.ada.", "proj_out_1."),
    ("final.linear.", "proj_out_2."),
    (".ada.", ".norm1.linear."),
    ("blocks.", "transformer_blocks."),
    ("patch_embed.", "pos_embed.proj."),
    ("t_embed.0.", "timestep_embedder.linear_1."),
    ("t_embed.2.", "timestep_embedder.linear_2."),
    ("y_embed.", "class_embedder.embedding_table."),
)


def to_diffusers(state_dict: dict, config: DiTConfig) -> tuple[dict, dict]:
    """(config.json, state dict) of the DiTTransformer2DModel that has these weights of ours.

    Its output is ours at t = 0 alone: it embeds t with frequencies 10000^(-i/127), the published DiT and we with
    10000^(-i/128). With `block.norm1.emb.time_proj.downscale_freq_shift = 0` in each of its transformer_blocks it is
    ours at all t. For block="classic" with classes and without low_res; raises UserError for another mlp_ratio than 4.
    """
    assert config.block == "classic" and config.num_classes and not config.low_res, config
    if config.mlp_hidden != 4 * config.width:
        raise UserError(f"mlp_ratio={config.mlp_ratio:g}; diffusers' DiT accepts 4 alone")
    theirs = {}
    for name, value in state_dict.items():
        if name == "patch_embed.weight":  # (C, ch * p * p) -> (C, ch, p, p)
            value = value.unflatten(1, (-1, config.patch_size, config.patch_size))
        shared = name.startswith(("t_embed.", "y_embed."))
        for ours, other in KEYS:
            name = name.replace(ours, other)
        if shared:  # of which each of their blocks has a copy
            theirs |= {f"transformer_blocks.{i}.norm1.emb.{name}": value for i in range(config.depth)}
        elif ".qkv." in name:  # three matrices of theirs
            theirs |= {name.replace(".qkv.", f".attn1.to_{n}."): part for n, part in zip("qkv", value.chunk(3))}
        else:
            theirs[name] = value
    settings = dict(
        _class_name="DiTTransformer2DModel",
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.image_size,
        patch_size=config.patch_size,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=1e-6,  # as published; their default is 1e-5
    )
    return settings, theirs
