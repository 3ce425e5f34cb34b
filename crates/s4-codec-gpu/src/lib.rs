//! GPU codecs and kernels.
//!
//! `kernels/` holds the CUDA sources: `planes.cuh` splits and merges values, `rans*.cuh` code and
//! decode plane E (docs/codecs/rans.md, `P` = 8, one table in the stream), `rans.cu` has the entry
//! points. They need sm_75 and no host headers, so NVRTC can compile them.
//!
//! `kernels/tests/run_emulated.sh` compares them with a plain reference on a machine without a GPU;
//! `kernels/tests/bench.cu` does so on a GPU, and times them.
//!
//! A chunk is encoded as the CPU engine does it, byte for byte: at most 2^17 values of 2 bytes or 2^16 of
//! 4, a thread block for each, a warp for each segment. The stream of plane E carries the end of the
//! chunk's plane A, so both kernels know of plane A only in layout `fields` with plane A stored raw.
//!
//! Absent: `P` = 12 (not in the stream, so the caller must not bring one), contexts and shared tables
//! (the decoder says `kUnsupported`; the CPU's reads them), and carrying the end of a coded plane A.

pub mod nvcomp;
