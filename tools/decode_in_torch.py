"""Decodes with the layers of `bench decode_8b_1`, in PyTorch, as a peer to compare with.

    torchrun --nproc-per-node 2 tools/decode_in_torch.py --size 8B --layers 8 --batch 1

The layers have random weights: tensor-parallel attention with a key-value cache, and an MLP.
Besides, positions are rotated, new keys and values are stored, and the best token is found.
torch.compile compiles a step, and a CUDA graph replays it. Sums over the ranks use each of these in
turn; the fastest is what a user would pick:

    nccl         torch.distributed.all_reduce
    one_shot     torch.ops.symm_mem.one_shot_all_reduce, on symmetric memory
    two_shot     torch.ops.symm_mem.two_shot_all_reduce_, on symmetric memory
    none         no sums: the bound

NVLink multicast stays off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0), as in the other
comparisons.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F

# hidden, intermediate, heads, key-value heads, vocabulary, layers: as in bench.
SIZES = {
    "tiny": (256, 768, 8, 8, 512, 2),
    "8B": (4096, 14336, 32, 8, 128_256, 32),
    "70B": (8192, 28672, 64, 8, 128_256, 80),
}
EPS, THETA = 1e-5, 500_000.0
UNTIMED_STEPS = 4


class Decoder:
    """One rank's part of the model, and a step of decoding."""

    def __init__(self, options: argparse.Namespace, length: int, total: Callable):
        hidden, inner, heads, kv_heads, vocabulary, layers = SIZES[options.size]
        layers = options.layers or layers
        ranks = dist.get_world_size()
        self.channels, self.total, self.batch = hidden // heads, total, options.batch
        torch.manual_seed(dist.get_rank())

        def matrix(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            return values * rows**-0.5

        def ones() -> torch.Tensor:
            return torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

        own, own_kv = heads // ranks * self.channels, kv_heads // ranks * self.channels
        self.layers = [
            (
                ones(), matrix(hidden, own), matrix(hidden, own_kv), matrix(hidden, own_kv),
                matrix(own, hidden), ones(), matrix(hidden, inner // ranks),
                matrix(hidden, inner // ranks), matrix(inner // ranks, hidden),
            )
            for _ in range(layers)
        ]  # fmt: skip
        self.norm = ones()
        torch.manual_seed(0)
        self.embedding = matrix(vocabulary, hidden)
        self.unembedding = matrix(hidden, vocabulary // ranks)
        shape = (layers, 2, options.batch, kv_heads // ranks, length, self.channels)
        self.cache = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        self.tokens = torch.zeros(options.batch, dtype=torch.int64, device="cuda")
        self.position = torch.zeros((), dtype=torch.int64, device="cuda")
        steps = torch.arange(self.channels // 2, device="cuda")
        self.frequencies = THETA ** (-2 * steps / self.channels)
        self.places = torch.arange(length, device="cuda")

    def rotary(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding of [batch, heads, 1, channels]."""
        angles = self.position * self.frequencies
        a, b = x.float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads * channels] as [batch, heads, 1, channels]."""
        return x.view(self.batch, -1, 1, self.channels)

    def step(self) -> None:
        """Finds the next token of each sequence."""
        residual = self.embedding[self.tokens]
        seen = (self.places <= self.position)[None, None, None]
        norms = [layer[0] for layer in self.layers[1:]] + [self.norm]
        x = F.rms_norm(residual, residual.shape[-1:], self.layers[0][0], EPS)
        for i, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):
            _, query, key, value, output, norm_2, gate, up, down = layer
            q, k = self.rotary(self.split(x @ query)), self.rotary(self.split(x @ key))
            keys, values = self.cache[i]
            keys.index_copy_(2, self.position[None], k)
            values.index_copy_(2, self.position[None], self.split(x @ value))
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
            residual = residual + self.total(mixed.reshape(self.batch, -1) @ output)
            x = F.rms_norm(residual, residual.shape[-1:], norm_2, EPS)
            residual = residual + self.total((F.silu(x @ gate) * (x @ up)) @ down)
            x = F.rms_norm(residual, residual.shape[-1:], next_norm, EPS)
        best, where = (x @ self.unembedding).float().max(-1)
        where = where + dist.get_rank() * self.unembedding.shape[1]
        mine = torch.stack([best, where.float()])
        found = torch.empty(dist.get_world_size(), *mine.shape, device="cuda")
        dist.all_gather_into_tensor(found.flatten(0, 1), mine)
        rank = found[:, 0].argmax(0)
        self.tokens.copy_(found[:, 1].gather(0, rank[None])[0].long())
        self.position.add_(1)


def sums(options: argparse.Namespace) -> dict[str, Callable]:
    """Returns the ways to sum over the ranks."""
    group = dist.group.WORLD
    hidden = SIZES[options.size][0]

    def nccl(x: torch.Tensor) -> torch.Tensor:
        return torch.distributed._functional_collectives.all_reduce(x, "sum", group)

    ways: dict[str, Callable] = {"nccl": nccl, "none": lambda x: x}
    if dist.get_world_size() == 1:
        return ways
    symmetric_memory.enable_symm_mem_for_group(group.group_name)
    buffer = symmetric_memory.empty(options.batch, hidden, device="cuda", dtype=torch.bfloat16)
    symmetric_memory.rendezvous(buffer, group)

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group.group_name).clone()

    return ways | {"one_shot": one_shot, "two_shot": two_shot}


def tokens_per_second(options: argparse.Namespace, total: Callable) -> float:
    """Decodes with one way to sum."""
    length = UNTIMED_STEPS + (options.rounds + 1) * options.steps + 1
    decoder = Decoder(options, length, total)
    step = torch.compile(decoder.step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(UNTIMED_STEPS):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    seconds = []
    for _ in range(options.rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(options.steps):
            graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return options.batch * options.steps / statistics.median(seconds)


def main() -> None:
    """Prints tokens per second with each way to sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--layers", type=int, metavar="N", help="default: as many as the size has")
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--steps", type=int, default=16, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    result = {}
    with torch.no_grad():
        for name, total in sums(options).items():
            torch._dynamo.reset()
            result[name] = tokens_per_second(options, total)
            if dist.get_rank() == 0:
                print(f"{name:<10}{result[name]:>12.0f} tokens/s", flush=True)
    if options.json and dist.get_rank() == 0:
        found = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
        settings = {name: getattr(options, name) for name in ("size", "layers", "batch")}
        found |= {"ranks": dist.get_world_size(), "settings": settings, "tokens_per_second": result}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
