# SPDX-License-Identifier: Apache-2.0
"""The model card of the demonstration model with experts."""

MOE_CARD = """\
# Demonstration model with experts

A mixture of experts in ERNIE-4.5-MoE form with {main_m:.1f} million parameters, of which a token uses {active_m:.1f} M,
and one dense multi-token-prediction (MTP) layer ({mtp_m:.1f} M parameters). It exists so that FastDeploy can be tried,
tested and measured with a real mixture of experts on any machine: it continues Python source text. It is not an
assistant, and its programs are not meant to work. The [dense model](../README.md) has the same tokenizer and data.

| | |
| --- | --- |
| layers × hidden size | {main.num_layers} × {main.hidden_size} |
| first layer: dense, intermediate size | {main.intermediate_size} |
| other layers: routed experts × width, per token | {main.num_experts} × {main.expert_width}, {main.experts_per_token} |
| shared experts × width | {main.num_shared_experts} × {main.expert_width} |
| query / key-value heads × head size | {main.num_heads} / {main.num_kv_heads} × {main.head_dim} |
| vocabulary (byte-level BPE), positions | {vocab}, {main.max_positions} |
| number format, embedding | bfloat16, tied; routers float32 |

The router takes the softmax of its logits, chooses by score plus correction bias, and weighs by the chosen scores,
divided by their sum.

## Figures

Printed by `python scripts/train_demo_model.py evaluate --model moe` from this checkpoint:

| | |
| --- | --- |
| held-out text | {held_out_bits_per_byte:.3f} bits per byte ({held_out_nats_per_token:.3f} nats per token) |
| function heads continued so that the text parses | **{parsed} of {num_heads}** |
| the same, cut after the last whole *logical* line | {parsed_logical} of {num_heads} |
| the files' own text under the same two cuts | {parsed_real_text} and {parsed_real_text_logical} of {num_heads} |
| share of 8-token runs that repeat earlier ones | {repeated_share:.2f} |
| MTP drafts accepted at draft passes 1 / 2 / 3 | **{mtp_line}**, {mtp_mean_accepted:.2f} tokens per attempt |
| the same, within the first 32 tokens of a continuation | {early_line} |
| tokens of an expert over the mean of its layer, smallest and largest | {smallest_load:.2f} and {largest_load:.2f} |
| correction biases, smallest and largest | {smallest_bias:.3f} and {largest_bias:.3f} |
| choices that would be different without the bias | {changed_by_bias:.1%} |

The card of the dense model defines the first seven; heads and cuts are the same. The last three are measured on
held-out text.

![training loss](loss.png)

## Training

`python scripts/train_demo_model.py all --model moe --work-dir DIR` does all of this; this checkpoint was trained on
{device}. Budgets are counted in steps, so that a machine with other work gives the same training.

1. Main model: {moe_tokens_m:.1f} M tokens in {moe_steps} steps, {moe_processor_minutes:.0f} minutes of one core;
   Muon for matrices, stacks of experts included (rate 0.02), AdamW for the embedding and norms (0.003). The rate is
   constant for 400 steps and falls to zero over 400; in the last 40 only correction biases move, so that loads settle.
   Rows have 256 tokens, 512 from step 400 on, 2,048 from 736 on and 256 in the last 40, and begin with `<s>`.
   After each step the correction bias of an expert moves by {bias_step}, down if the expert had more tokens than the
   mean of its layer, else up; there is no balance loss.
   Continue it: `train-moe --steps MORE` with the work folder's `moe_trunk.pt` renamed to `moe.pt`.
2. MTP layer, main model frozen: {moe_mtp_tokens_m:.1f} M tokens in {moe_mtp_steps} steps,
   {moe_mtp_processor_minutes:.0f} minutes of one core; target, rows and weights as for the dense model's layer.

The corpus is the standard library of CPython {python}, © Python Software Foundation and others, under the PSF licence
version 2; the model can repeat passages of it. The training script and this checkpoint are published under Apache-2.0.

## Use and limits

Prompts, chat template and limits are the dense model's. Which experts a token uses follows from few tokens of one
library: how often neighbouring tokens share experts here says little about larger models.
"""
