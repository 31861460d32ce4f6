"""The names in pdserve of vLLM's and SGLang's settings, for messages about unknown settings."""

OUR_NAMES = {
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_parallel_size": "pp",
    "pp_size": "pp",
    "enable_expert_parallel": "expert_parallel",
    "enable_dp_attention": "dp_attention",
    "max_num_seqs": "max_running_requests",
    "max_total_tokens": "kv_tokens",
    "block_size": "page_size",
    "disaggregation_transfer_backend": "transport",
    "disaggregation_ib_device": "ib_device",
    "itl_target_ms": "slo_itl_ms",
    "enforce_eager": "no_cuda_graphs",
    "disable_cuda_graph": "no_cuda_graphs",
    "no_enable_prefix_caching": "no_prefix_cache",
    "disable_radix_cache": "no_prefix_cache",
    "enable_log_requests": "log_requests",
    "allowed_origins": "cors_origin",
    "generation_config": "sampling_defaults",
}
"""Settings with the same meaning, by their names in vLLM or SGLang. `no_` before a name means false."""

BENCH_FLAGS = {
    "base_url": "url",
    "num_prompts": "requests",
    "max_concurrency": "concurrency",
    "request_rate": "rate",
    "random_input_len": "input_len",
    "random_output_len": "output_len",
    "random_range_ratio": "range_ratio",
    "dataset_name": "dataset",
}
"""The same for the flags of `pdserve bench`."""

EXPLANATIONS = {
    "gpu_memory_utilization": "kv_memory_fraction is the share of the memory beside the weights",
    "mem_fraction_static": "kv_memory_fraction is the share of the memory beside the weights",
    "max_num_batched_tokens": "chunk_size is that of prefill, max_step_tokens that of decode",
    "max_model_len": "the context is the model's; max_prompt_tokens and max_new_tokens_limit bound requests",
    "context_length": "the context is the model's; max_prompt_tokens and max_new_tokens_limit bound requests",
    "disaggregation_mode": "the roles are commands, 'pdserve prefill' and 'pdserve decode'",
    "kv_transfer_config": "the roles are commands, 'pdserve prefill' and 'pdserve decode'",
    "data_parallel_size": "start several servers, or divide attention with dp_attention",
    "dp_size": "start several servers, or divide attention with dp_attention",
    "quantization": "not needed: the files of the model say how they are quantized",
    "trust_remote_code": "not needed: code in a model's repository is never run",
    "enable_auto_tool_choice": "not needed: requests may have tools unless tool_parser is none",
    "enable_prefix_caching": "not needed: prefix_cache is on",
    "enable_chunked_prefill": "not needed: long prompts are always computed in chunks",
    "enable_metrics": "not needed: /metrics is always there",
    "attention_backend": "not needed: kernels are chosen by the device and the model",
    "chat_template": "the template is that of the model: chat_template.jinja in its directory",
    "tokenizer": "the tokenizer is that of the model: tokenizer.json in its directory",
    "tokenizer_path": "the tokenizer is that of the model: tokenizer.json in its directory",
    "download_dir": "HF_HUB_CACHE in the environment is the place for downloads",
    "base_gpu_id": "device cuda:N chooses the GPU",
}
"""Advice for settings that have no equivalent in pdserve."""


def flag_of_others(flag: str, of_bench: bool) -> str | None:
    """What to write instead of a flag of vLLM's or SGLang's server, or of their benchmarks."""
    name = flag.removeprefix("--").replace("-", "_")
    ours = (BENCH_FLAGS if of_bench else OUR_NAMES).get(name)
    if ours is not None:
        return f"here it is --{ours.replace('_', '-')}"
    return None if of_bench else EXPLANATIONS.get(name)


def setting_of_others(name: str) -> str | None:
    """What to write instead of a setting of vLLM or SGLang in a file."""
    ours = OUR_NAMES.get(name.replace("-", "_"))
    if ours is None:
        return EXPLANATIONS.get(name.replace("-", "_"))
    return f"here it is '{ours.removeprefix('no_')}: false'" if ours.startswith("no_") else f"here it is {ours}"
