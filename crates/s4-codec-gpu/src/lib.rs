//! GPU codecs and kernels.
//!
//! `kernels/` holds the CUDA sources: `planes.cuh` splits and merges values, `rans*.cuh` code and
//! decode plane E (docs/codecs/rans.md, `P` = 8, one table in the stream), `rans.cu` has the entry
//! points. They need sm_75 and no host headers, so NVRTC can compile them.
//!
//! `kernels/tests/run_emulated.sh` compares them with a plain reference on a machine without a GPU;
//! `kernels/tests/bench.cu` does so on a GPU, and times them.
//!
//! Absent: `P` = 12 (not in the stream, so the caller must not bring one), contexts and shared tables
//! (the decoder says `kUnsupported`; the CPU's reads them), and encoding chunks of more than 65536
//! values.
