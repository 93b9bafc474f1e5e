# SPDX-License-Identifier: Apache-2.0
"""Names of the flags of other servers: FastDeploy 2.6, and vLLM from 0.8 to 0.33."""

from __future__ import annotations

FASTDEPLOY = """
model served-model-name tokenizer revision host port workers metrics-port api-key max-concurrency max-waiting-time
timeout-graceful-shutdown max-model-len max-num-seqs max-num-batched-tokens block-size gpu-memory-utilization
kv-cache-ratio num-gpu-blocks-override swap-space enable-prefix-caching enable-chunked-prefill tensor-parallel-size
data-parallel-size enable-expert-parallel quantization load-choices seed speculative-config guided-decoding-backend
reasoning-parser tool-call-parser chat-template enable-logprob max-logprobs graph-optimization-config splitwise-role
engine-worker-queue-port cache-queue-port pd-comm-port rdma-comm-ports cache-transfer-protocol scheduler-name
scheduler-host scheduler-port scheduler-db scheduler-password scheduler-topic scheduler-ttl scheduler-max-size
scheduler-min-load-score scheduler-load-shards-num scheduler-sync-period scheduler-expire-period logprobs-mode
controller-port enable-mm-output timeout model-config-name tokenizer-base-url task runner convert model-impl
override-pooler-config use-warmup limit-mm-per-prompt mm-processor-kwargs max-encoder-cache max-processor-cache
enable-mm tool-parser-plugin plas-attention-config early-stop-config enable-early-stop
guided-decoding-disable-any-whitespace
enable-keep-sampling-mask enable-entropy lm-head-fp32 logits-processors dynamic-load-weight load-strategy
rsync-config local-data-parallel-id enable-eplb eplb-config routing-replay-config enable-chunked-moe chunked-moe-size
disable-custom-all-reduce enable-flashinfer-allreduce-fusion use-internode-ll-two-stage disable-sequence-parallel-moe
shutdown-comm-group-if-worker-idle prealloc-dec-block-slot-num-threshold static-decode-blocks kvcache-storage-backend
write-policy ips enable-output-caching max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold
disable-chunked-mm-input enable-overlap-schedule router scheduler-release-load-expire-period scheduler-reader-parallel
scheduler-writer-parallel scheduler-reader-batch-size scheduler-writer-batch-size skip-port-check
"""
VLLM_ENGINE = """
model runner convert tokenizer tokenizer-mode trust-remote-code dtype seed hf-config-path allowed-local-media-path
allowed-media-domains revision code-revision tokenizer-revision max-model-len quantization quantization-config
allow-deprecated-quantization enforce-eager enable-return-routed-experts return-sampling-mask max-logprobs logprobs-mode
use-fp64-gumbel enable-trace-replay disable-sliding-window disable-cascade-attn skip-tokenizer-init enable-prompt-embeds
served-model-name config-format hf-token hf-overrides model-class-overrides pooler-config generation-config
override-generation-config enable-sleep-mode enable-cumem-allocator enable-nccl-comm-suspend model-impl
logits-processors io-processor-plugin renderer-num-workers load-format download-dir safetensors-load-strategy
safetensors-prefetch-num-threads safetensors-prefetch-block-size model-loader-extra-config ignore-patterns
use-tqdm-on-load pt-load-map-location attention-backend mamba-backend mamba-ssu-algorithm
enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds reasoning-parser reasoning-parser-plugin
distributed-executor-backend pipeline-parallel-size master-addr master-port nnodes node-rank distributed-timeout-seconds
cpu-distributed-timeout-seconds numa-bind numa-bind-nodes numa-bind-cpus device-ids tensor-parallel-size
decode-context-parallel-size dcp-comm-backend dcp-q-replicate dcp-kv-cache-interleave-size cp-kv-cache-interleave-size
prefill-context-parallel-size data-parallel-size data-parallel-rank data-parallel-start-rank data-parallel-size-local
data-parallel-address data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
data-parallel-multi-port-external-lb enable-expert-parallel enable-batch-sharded-sampling enable-ep-weight-filter
all2all-backend enable-dbo ubatch-size enable-elastic-ep dbo-decode-token-threshold dp-sync-interval
dbo-prefill-token-threshold disable-nccl-for-dp-synchronization enable-eplb eplb-config expert-placement-strategy
max-parallel-loading-workers ray-workers-use-nsight disable-custom-all-reduce worker-cls worker-extension-cls
enable-fault-tolerance fault-tolerance-config block-size gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype
num-gpu-blocks-override enable-prefix-caching prefix-caching-hash-algo prefix-cache-retention-interval
kv-cache-dtype-skip-layers kv-sharing-fast-prefill mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size
prefix-match-unit mamba-cache-mode replayssm-buffer-len use-replayssm kv-offloading-size kv-offloading-backend
offload-backend cpu-offload-gb cpu-offload-params offload-group-size offload-num-in-group offload-prefetch-step
offload-params language-model-only limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs
mm-processor-cache-gb mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-only
mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin interleave-mm-strings skip-mm-profiling
video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize
enable-lora max-loras max-lora-rank lora-dtype enable-tower-connector-lora max-cpu-loras fully-sharded-loras
lora-target-modules default-mm-loras specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras
show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces
kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-layerwise-nvtx-tracing enable-mfu-metrics
enable-logging-iteration-details jit-monitor-mode jit-monitor-verbose enable-mm-processor-stats max-num-batched-tokens
max-num-scheduled-tokens max-num-seqs max-num-queued-reqs max-num-queued-tokens long-prefill-token-threshold
scheduling-policy enable-chunked-prefill disable-chunked-mm-input scheduler-cls scheduler-reserve-full-isl watermark
prefill-schedule-interval disable-hybrid-kv-cache-manager async-scheduling stream-interval cudagraph-capture-sizes
max-cudagraph-capture-size ir-op-priority enable-flashinfer-autotune enable-bf16x3-router-gemm moe-backend
linear-backend speculative-config spec-method spec-model spec-tokens diffusion-config kv-transfer-config
kv-events-config ec-transfer-config ec-manager-config compilation-config attention-config mamba-config reasoning-config
kernel-config additional-config structured-outputs-config profiler-config optimization-level performance-mode
weight-transfer-config watermark-config engram-config disable-log-stats aggregate-engine-logging
fail-on-environ-validation gdn-prefill-backend kda-prefill-backend
"""
VLLM_SERVER = """
headless api-server-count grpc uds shutdown-timeout enable-force-include-usage
enable-log-requests disable-log-requests lora-modules chat-template
chat-template-content-format trust-request-chat-template default-chat-template-kwargs reasoning-effort-budgets
response-role return-tokens-as-token-ids enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser
tool-parser-plugin tool-server tool-strict-level log-config-file max-log-len enable-prompt-tokens-details
enable-server-load-tracking sse-keep-alive-interval enable-per-request-metrics per-request-spec-decode-metrics
enable-tokenizer-info-endpoint enable-log-outputs enable-log-deltas cohere-is-reasoning-model cohere-format
log-error-stack tokens-only enable-scale-out fingerprint-mode fingerprint-value host port data-parallel-supervisor-port
dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold
uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints allow-credentials allowed-origins
allowed-methods allowed-headers api-key ssl-keyfile ssl-certfile ssl-ca-certs enable-ssl-refresh ssl-cert-reqs
ssl-ciphers root-path middleware enable-request-id-headers disable-fastapi-docs enable-offline-docs
enable-flash-late-interaction h11-max-incomplete-event-size h11-max-header-count disable-frontend-multiprocessing
"""
VLLM_OLDER = """
task use-v2-block-manager swap-space rope-scaling rope-theta max-seq-len-to-capture tokenizer-pool-size
tokenizer-pool-type tokenizer-pool-extra-config enable-lora-bias enable-prompt-adapter lora-extra-vocab-size
num-scheduler-steps multi-step-stream-outputs num-lookahead-slots preemption-mode scheduler-delay-factor
guided-decoding-backend logits-processor-pattern speculative-model speculative-model-quantization
speculative-draft-tensor-parallel-size num-speculative-tokens speculative-disable-mqa-scorer speculative-max-model-len
speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min spec-decoding-acceptance-method
typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha
disable-logprobs-during-spec-decoding disable-async-output-proc override-pooler-config calculate-kv-scales
enable-reasoning worker-use-ray quantization-param-path device max-num-partial-prefills max-long-partial-prefills
disable-mm-preprocessor-cache model-impl code-revision
"""
ALL = set((FASTDEPLOY + VLLM_ENGINE + VLLM_SERVER + VLLM_OLDER).split())
