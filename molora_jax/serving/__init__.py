"""An HTTP server over an engine, in the conventions of OpenAI's interface and vLLM's."""
