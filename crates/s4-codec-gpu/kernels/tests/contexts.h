// Instances of the composed kernels with contexts, for the tests: no plan has contexts yet. Include it after s4.cu.
#pragma once

#include "../contexts.cuh"

using namespace s4;

extern "C" {

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_contexts(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Direct, EncodeContexts>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_residual_contexts(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Difference, EncodeContexts>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_decode_contexts(const DecodeChunk* chunks, u32* status) {
  decode_composed<DecodeContexts>(chunks[blockIdx.x], status[blockIdx.x]);
}

}  // extern "C"
