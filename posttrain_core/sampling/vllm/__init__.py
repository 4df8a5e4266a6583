"""The vLLM rollout service: requests to one or more vLLM servers over HTTP, which hold a proved policy version.

sampler.py           VllmSampler: the Sampler protocol over a loop of its own
dispatch.py          what becomes of requests when servers die, hang and come back
placement.py         which server gets which request
completions.py       one streamed request: tokens in, tokens and log-probabilities out
server.py            one server: started when it is ours, swapped to a policy version, proved, watched
process.py           a server process of ours, which ends with this process
worker_extension.py  runs inside vLLM: swaps the weights in place
"""
