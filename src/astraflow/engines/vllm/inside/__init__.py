"""What runs inside a vLLM server, in vLLM's own environment: imports nothing but vLLM, torch and safetensors."""
