"""One process of an allreduce with PyTorch's Gloo, measured as `ripstop bench allreduce` measures its own members.

`ripstop bench allreduce --peer gloo --python PATH` starts N of these and reads the file that each writes. By hand:

    for rank in 0 1 2 3; do python gloo.py --rank $rank --members 4 --bytes 268435456 --rounds 10 --warm-up 2 --folder /tmp/here & done
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
for name in ("rank", "members", "bytes", "rounds", "warm-up"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--folder", required=True)
args = parser.parse_args()

torch.set_num_threads(1)
store = dist.FileStore(os.path.join(args.folder, "gloo-store"), args.members)
dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.members)
tensor = torch.ones(args.bytes // 4, dtype=torch.float32) * (args.rank + 1)

times = []
cpu = 0.0
for number in range(args.warm_up + args.rounds):
    if number == args.warm_up:
        cpu = time.process_time()
    tensor.fill_(args.rank + 1)
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if number >= args.warm_up:
        times.append((time.perf_counter() - began) * 1e3)
cpu = time.process_time() - cpu
wanted = args.members * (args.members + 1) / 2
assert bool((tensor == wanted).all()), "Gloo's sum is wrong"

with open(os.path.join(args.folder, f"gloo-{args.rank}.json"), "w", encoding="utf-8") as file:
    json.dump({"times_ms": times, "sent_bytes": 0, "cpu_s": cpu}, file)
dist.barrier()
dist.destroy_process_group()
