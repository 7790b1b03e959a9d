"""/metrics of several servers, each with the names and labels of its own, and values that tests know."""

VLLM_V1 = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.75e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2345678e+07
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="1",model_name="m"} 24.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 400.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 100.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 7.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 8.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 4.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 8.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 52.25
"""
VLLM_V0 = """\
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a \\"b\\", {c} # d"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a \\"b\\", {c} # d"} 0.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="a \\"b\\", {c} # d"} 0.125
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="a \\"b\\", {c} # d"} 0.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="a \\"b\\", {c} # d"} 10.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="a \\"b\\", {c} # d"} 20.0
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{model_name="a \\"b\\", {c} # d"} 4.0
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{model_name="a \\"b\\", {c} # d"} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="a \\"b\\", {c} # d"} 2.0
vllm:time_to_first_token_seconds_count{model_name="a \\"b\\", {c} # d"} 2.0
vllm:time_to_first_token_seconds_sum{model_name="a \\"b\\", {c} # d"} 0.5
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 16.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 16.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 128.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 128.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 0.28
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="m"} 86.5
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8000.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 7557.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1500.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 500.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 6.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_sum{model_name="m"} 20.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 10.0
sglang:time_to_first_token_seconds_count{model_name="m"} 10.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_sum{model_name="m"} 1.0
sglang:queue_time_seconds_bucket{le="+Inf",model_name="m"} 10.0
sglang:queue_time_seconds_count{model_name="m"} 10.0
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12
# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 6000
# TYPE tgi_batch_max_total_tokens gauge
tgi_batch_max_total_tokens 24000
# TYPE tgi_batch_inference_duration histogram
tgi_batch_inference_duration_bucket{method="prefill",le="+Inf"} 9
tgi_batch_inference_duration_sum{method="prefill"} 0.9
tgi_batch_inference_duration_count{method="prefill"} 9
# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="+Inf"} 9
tgi_request_input_length_sum 900
tgi_request_input_length_count 9
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="+Inf"} 9
tgi_request_generated_tokens_sum 450
tgi_request_generated_tokens_count 9
# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_bucket{le="+Inf"} 9
tgi_request_queue_duration_sum 0.018
tgi_request_queue_duration_count 9

"""
UNKNOWN = """\
# TYPE http_requests_total counter
http_requests_total{path="/v1/completions"} 7
go_goroutines 12
"""
