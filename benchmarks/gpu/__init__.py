"""halfstep on a GPU beside its peers: one command, one JSON file. `benchmarks/gpu.sh` starts it; `--device cpu --small` is the rehearsal of it.

    rates     matrix products and copies: what the device can do, for the floors
    laws      bits that must be equal whatever the device
    train     tokens/s and peak memory of a GPT-2 of 124 M and a Llama of 1.1 B parameters, in bf16 and fp16, and how often a step waits
    stage     everything between backward and the next forward, beside torch's fused AdamW
    tf32      fp32 products with tf32 on and off, and whether the switches are put back
    profile   what a step spends its time on

Each part runs in a process of its own with a time limit: one that fails, or ends with no memory left, is recorded as such and stops nothing.
"""
