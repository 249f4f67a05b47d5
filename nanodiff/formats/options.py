"""Options that may follow a model's name: RUN,step=500,ema=raw or FILE,heads=6. Their comments are rules that
configurator.py enforces."""

# Of a run
step = "newest"  # newest or >= 0: which checkpoint
ema = ""  # a rate, or raw
# Of a published file, which does not hold them
heads = 1  # >= 1
num_heads_upsample = 0  # >= 0: a UNet's
image_size = 1  # >= 1: a UNet's
noise_schedule = "linear"  # linear|cosine
num_timesteps = 1000  # >= 1
rescale_timesteps = False
variance = "fixed_large"  # fixed_small|fixed_large|learned_range
label_drop = 0.1  # [0, 1): 0 = the class table has no null class, as with Meta's class_dropout_prob=0
objective = "eps"  # eps|flow: Meta's form: DiT's, SiT's
time_input = "1-t"  # 1000t|t|1-t: objective=flow
