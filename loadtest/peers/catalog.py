"""The engines that can be compared, by the name of their row. No engine is imported here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """`factory(*arguments)` of the module loadtest.peers.<module> is the Peer."""

    module: str
    factory: str
    package: str
    """What to install for it."""
    arguments: tuple[str, ...] = ()
    ours: bool = False


CATALOG: dict[str, Entry] = {
    "pdbus torch": Entry("ours", "Ours", "pdbus[engine]", ("torch",), ours=True),
    "pdbus fp32": Entry("ours", "Ours", "pdbus[engine]", ("fp32",), ours=True),
    "pdbus int8": Entry("ours", "Ours", "pdbus[engine]", ("int8",), ours=True),
    "pdbus int4": Entry("ours", "Ours", "pdbus[engine]", ("int4",), ours=True),
    "llama.cpp Q4_1": Entry("llama_cpp_peer", "LlamaCpp", "llama-cpp-python", ("q4_1",)),
    "llama.cpp Q4_0": Entry("llama_cpp_peer", "LlamaCpp", "llama-cpp-python", ("q4_0",)),
    "llama.cpp Q8_0": Entry("llama_cpp_peer", "LlamaCpp", "llama-cpp-python", ("q8_0",)),
    "llama.cpp fp32": Entry("llama_cpp_peer", "LlamaCpp", "llama-cpp-python", ("f32",)),
    "ONNX GenAI int4": Entry("onnx_genai_peer", "OnnxGenai", "onnxruntime-genai", ("int4",)),
    "ONNX GenAI fp32": Entry("onnx_genai_peer", "OnnxGenai", "onnxruntime-genai", ("fp32",)),
    "OpenVINO GenAI Q4_1": Entry("openvino_peer", "OpenVino", "openvino-genai", ("q4_1",)),
    "OpenVINO GenAI Q8_0": Entry("openvino_peer", "OpenVino", "openvino-genai", ("q8_0",)),
    "CTranslate2 int8": Entry("ctranslate2_peer", "CTranslate2", "ctranslate2"),
    "transformers fp32": Entry("transformers_peer", "Transformers", "transformers"),
}
