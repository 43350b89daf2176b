"""Draws `docs/steps.svg` from the result files: a decode step against context, for each batch.

pip install --group plots; python bench/plot.py
"""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parent.parent / "docs" / "steps.svg"
PEER_TOKENS = 256  # the mean context of workload A: 128 in, 256 out
VLLM_A_TOK_S = 202.4  # vLLM 0.26.0 on workload A, the same model of GPU in another run


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "hillstar"  # the same file from the same figures
    steps = json.loads((RESULTS / "h200-steps.json").read_text())
    engine = json.loads((RESULTS / "h200-engine.json").read_text())
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    batches = sorted({int(key.split("x")[0]) for key in steps["step_ms"]})
    for index, batch in enumerate(batches):
        contexts = sorted(
            int(key.split("x")[1]) for key in steps["step_ms"] if key.startswith(f"{batch}x")
        )
        color = f"C{index}"
        ours = [steps["step_ms"][f"{batch}x{context}"] for context in contexts]
        floor = [steps["floor_ms"][f"{batch}x{context}"] for context in contexts]
        axes.plot(contexts, ours, "o-", color=color, label=f"batch {batch}")
        axes.plot(contexts, floor, ":", color=color)
    axes.plot([], [], ":", color="gray", label="floor: bytes / measured bandwidth")
    peers = [("vLLM 0.26.0, batch 1 (another run)", VLLM_A_TOK_S, "s")]
    if "peer" in engine:
        rate = engine["peer"]["transformers_A_tok_s"]
        peers.append(("transformers, compiled, batch 1 (same machine and run as A)", rate, "^"))
    for label, rate, marker in peers:
        axes.plot([PEER_TOKENS], [1e3 / rate], marker, color="black", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of context of each sequence",
        ylabel="milliseconds a decode step",
        title=f"{steps['machine']['gpu']}, 8B shape, bf16 ({steps['commit'][:7]})",
    )
    axes.set_xticks([256, 512, 2048, 8192, 32768], ["256", "512", "2k", "8k", "32k"])
    axes.set_yticks([4, 5, 6, 8, 10, 15, 20], ["4", "5", "6", "8", "10", "15", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
