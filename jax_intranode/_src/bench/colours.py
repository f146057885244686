"""The colours of libraries in pictures. After Okabe and Ito: told apart by the colour-blind too."""

COLOURS = {
    "ours": "#0072B2",
    "lax": "#D55E00",
    "torch nccl": "#E69F00",
    "torch one_shot": "#009E73",
    "torch two_shot": "#CC79A7",
    "torch fused": "#009E73",
    "nccl-tests": "#000000",
}
OTHER = "#999999"
