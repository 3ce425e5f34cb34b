//! Frames that callers hold on to: the bytes that the CPU makes, in memory that is reused.

use std::sync::Barrier;

use bytes::Bytes;
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, FrameMemory, GpuError};
use s4_engine::{Engine, Jobs, NoInputs, Preset};
use s4_format::DType;
use s4_format::limits::ALIGN;
use s4_planes::patterns::{self, Kind};

use crate::support::{Encoded, Gpu, Host, Upload, gpu, on_cpu};

/// Pieces of this budget have 2 MiB and 64 KiB, the smallest size.
const SMALL: u64 = 3 * PIECE;
const PIECE: u64 = (2 << 20) + (64 << 10);

const NONE: FrameMemory = FrameMemory { taken: 0, idle: 0, kept: 0, budget: 0, pieces: 0 };

/// Tensors, some of whose chunks are stored plain, that need two small pieces.
struct Tensors {
    hosts: Vec<Host>,
    uploads: Vec<Upload>,
    cpu: Vec<Encoded>,
}

impl Tensors {
    fn new(gpu: &Gpu) -> Self {
        Self::times(gpu, 1)
    }

    /// The same with `times` times the values.
    fn times(gpu: &Gpu, times: usize) -> Self {
        let mut state = 1u32;
        let mut noise = |n: usize| {
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            (0..n).map(|_| next()).collect::<Vec<_>>()
        };
        let weights =
            patterns::all(Kind::BF16, 150_000 * times).find(|p| p.0 == "like-weights").unwrap().1;
        let hosts = vec![
            Host::new("noise", DType::Int16, noise(1_400_006 * times)),
            Host::new("weights", DType::BFloat16, weights),
            Host::new("more noise", DType::Int32, noise(1_300_004 * times)),
        ];
        let uploads = hosts.iter().map(|h| gpu.upload(&h.data, 0)).collect();
        let cpu = hosts.iter().map(|h| on_cpu(h, None)).collect();
        Self { hosts, uploads, cpu }
    }

    /// Encodes them; returns frames that can be held on to, and copies of the others.
    fn encode(&self, engine: &CudaEngine) -> Result<Vec<Frame>, CudaError> {
        self.encode_until(engine, usize::MAX)
    }

    fn encode_until(&self, engine: &CudaEngine, most: usize) -> Result<Vec<Frame>, CudaError> {
        Ok(self.encode_with(engine, most)?.0)
    }

    /// As [`Self::encode`]; also returns the most bytes of frames that came at one time.
    fn encode_with(
        &self,
        engine: &CudaEngine,
        most: usize,
    ) -> Result<(Vec<Frame>, usize), CudaError> {
        let tensors = self.hosts.iter().zip(&self.uploads).map(|(h, u)| h.on(u));
        let tensors: Vec<_> = tensors.collect();
        let plans = engine.plan::<CudaError>(Preset::Fast, &tensors, &NoInputs, None)?;
        let (mut found, mut at_once) = (vec![], 0);
        engine.encode(&Jobs::<CudaError>::new(&tensors, &plans), |frames| {
            at_once = at_once.max(frames.iter().map(|f| f.bytes.len()).sum());
            for f in frames {
                let (tensor, chunk, held) = (f.tensor, f.chunk as usize, f.held.is_some());
                let bytes = match f.place() {
                    Some((all, at)) => {
                        let padded = (at + f.bytes.len()).next_multiple_of(ALIGN);
                        assert!(all[at..].starts_with(f.bytes));
                        assert!(all[at + f.bytes.len()..padded].iter().all(|b| *b == 0));
                        assert!(at.is_multiple_of(ALIGN));
                        all.slice(at..at + f.bytes.len())
                    }
                    None => Bytes::copy_from_slice(f.bytes),
                };
                found.push(Frame { tensor, chunk, held, bytes });
                if found.len() == most {
                    return Err(GpuError::Argument("enough".into()).into());
                }
            }
            Ok(())
        })?;
        Ok((found, at_once))
    }

    /// Checks frames; returns how many of them are held.
    fn check(&self, frames: &[Frame]) -> usize {
        let all = self.cpu.iter().map(|e| e.chunks.len()).sum::<usize>();
        assert_eq!(frames.len(), all);
        for f in frames {
            let expected = &self.cpu[f.tensor].chunks[f.chunk].1;
            assert!(f.bytes == *expected, "{}, chunk {}", self.hosts[f.tensor].name, f.chunk);
        }
        frames.iter().filter(|f| f.held).count()
    }
}

struct Frame {
    tensor: usize,
    chunk: usize,
    held: bool,
    bytes: Bytes,
}

fn engine(gpu: &Gpu, frames: u64) -> CudaEngine {
    gpu.engine(CudaOptions { frames, ..CudaOptions::default() })
}

#[test]
fn frames_are_the_same_held_or_copied() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    // None, one piece of two, all in two pieces, all in one.
    for (budget, pieces) in [(PIECE - 1, 0), (PIECE, 1), (SMALL, 2), (1 << 30, 1)] {
        for scratch in [16 << 20, 256 << 20] {
            let engine =
                gpu.engine(CudaOptions { frames: budget, scratch, ..CudaOptions::default() });
            let frames = tensors.encode(&engine).unwrap();
            let held = tensors.check(&frames);
            let memory = engine.frame_memory();
            assert_eq!((memory.pieces, memory.idle, memory.budget), (pieces, 0, budget));
            assert!(memory.taken <= budget);
            match pieces {
                0 => assert_eq!(held, 0),
                1 if budget == PIECE => assert!(0 < held && held < frames.len(), "{held}"),
                _ => assert_eq!(held, frames.len()),
            }
            // Held frames outlive the engine.
            drop(engine);
            assert_eq!(tensors.check(&frames), held);
        }
    }
}

/// Groups that are larger than a slot's host memory, if pieces have room for them.
#[test]
fn large_groups_have_places_in_pieces() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::times(&gpu, 7);
    // No piece, pieces that are too small for it, and two sizes of others.
    for (frames, large) in [(0, false), (40 << 20, false), (80 << 20, true), (1 << 30, true)] {
        let (scratch, pinned) = (256 << 20, 16 << 20);
        let engine = gpu.engine(CudaOptions { scratch, pinned, frames, ..CudaOptions::default() });
        for _ in 0..2 {
            let (found, most) = tensors.encode_with(&engine, usize::MAX).unwrap();
            assert_eq!(tensors.check(&found) == found.len(), frames > 0, "{frames}");
            assert_eq!(most > 4 << 20, large, "{frames}: {most} bytes at once");
        }
        let chunks = engine.chunks();
        assert!(chunks.host + chunks.refused == 0, "{chunks:?}");
    }
}

#[test]
fn pieces_are_used_again_once_nobody_holds_them() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, SMALL);
    for save in 0..5 {
        let frames = tensors.encode(&engine).unwrap();
        assert_eq!(tensors.check(&frames), frames.len(), "save {save}");
        let memory = engine.frame_memory();
        assert_eq!(memory, FrameMemory { taken: 2 * PIECE, budget: SMALL, pieces: 2, ..NONE });
        // One frame keeps its piece, and no other.
        let last = frames.into_iter().next_back();
        assert_eq!(engine.frame_memory().idle, PIECE);
        drop(last);
        assert_eq!(engine.frame_memory().idle, 2 * PIECE);
    }
    engine.trim_frame_memory();
    let memory = engine.frame_memory();
    assert_eq!(memory, FrameMemory { budget: SMALL, pieces: 2, ..NONE });
    tensors.encode(&engine).unwrap();
    assert_eq!(engine.frame_memory().pieces, 4);
}

#[test]
fn what_the_budget_has_no_room_for_is_to_be_copied() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, SMALL);
    let first = tensors.encode(&engine).unwrap();
    let second = tensors.encode(&engine).unwrap();
    let third = tensors.encode(&engine).unwrap();
    assert_eq!(tensors.check(&first), first.len());
    let held = tensors.check(&second);
    assert!(0 < held && held < second.len(), "{held}");
    assert_eq!(tensors.check(&third), 0);
    assert_eq!(engine.frame_memory().taken, SMALL);
    // With a smaller budget, held memory stays, and goes back to the system after that.
    engine.limit_frame_memory(PIECE);
    assert_eq!(engine.frame_memory().taken, SMALL);
    drop(first);
    assert_eq!(engine.frame_memory().taken, PIECE);
    assert_eq!(tensors.check(&second), held);
    drop(second);
    let memory = engine.frame_memory();
    assert_eq!((memory.taken, memory.idle), (PIECE, PIECE));
    engine.limit_frame_memory(SMALL);
    let again = tensors.encode(&engine).unwrap();
    assert_eq!(tensors.check(&again), again.len());
}

#[test]
fn pieces_are_taken_before_they_are_needed() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, 6 * PIECE);
    assert!(!engine.grow_frame_memory(PIECE), "no piece was needed yet");
    drop(tensors.encode(&engine).unwrap());
    let needed = engine.frame_memory().taken;
    // Enough for two such saves at the same time, which then take nothing more.
    while engine.grow_frame_memory(2 * needed) {}
    let memory = engine.frame_memory();
    assert!(2 * needed < memory.taken && memory.taken <= memory.budget, "{memory:?}");
    assert_eq!(memory.idle, memory.taken);
    let both = [tensors.encode(&engine).unwrap(), tensors.encode(&engine).unwrap()];
    assert!(both.iter().all(|frames| tensors.check(frames) == frames.len()));
    assert_eq!(engine.frame_memory().pieces, memory.pieces);
    drop(both);
    // Never beyond the budget.
    while engine.grow_frame_memory(1 << 40) {}
    let memory = engine.frame_memory();
    assert_eq!((memory.taken, memory.idle), (6 * PIECE, 6 * PIECE));
}

#[test]
fn frames_that_stay_have_half_of_the_budget() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, 8 * PIECE);
    let save = || tensors.encode(&engine).unwrap();
    let bytes = |frames: &[Frame]| frames.iter().map(|f| f.bytes.clone()).collect::<Vec<_>>();
    let frames = save();
    let one = bytes(&frames).iter().map(|f| f.len() as u64).sum();
    let kept = engine.keep_frames(&bytes(&frames)).unwrap();
    drop(frames);
    let memory = engine.frame_memory();
    assert_eq!((memory.kept, memory.taken, memory.idle), (one, 2 * PIECE, 0));
    // The next save takes other pieces, and as much is taken in advance for the one after it.
    let second = save();
    assert_eq!((tensors.check(&second), engine.frame_memory().taken), (second.len(), 4 * PIECE));
    let more = engine.keep_frames(&bytes(&second)).unwrap();
    assert_eq!(engine.frame_memory().kept, 2 * one);
    drop(second);
    while engine.grow_frame_memory(one) {}
    assert!(engine.frame_memory().idle > one);
    let third = save();
    assert!(engine.keep_frames(&bytes(&third)).is_none(), "{:?}", engine.frame_memory());
    // What is kept is what was encoded.
    let same = |kept: &[Bytes]| kept.iter().eq(third.iter().map(|f| &f.bytes));
    assert!(same(&kept) && same(&more));
    drop(more);
    assert_eq!(engine.frame_memory().kept, one);
    assert!(engine.keep_frames(&bytes(&third)).is_some());
    // A part of what was kept keeps its claim.
    let last = kept.into_iter().next_back();
    assert_eq!(engine.frame_memory().kept, one);
    drop(last);
    assert_eq!(engine.frame_memory().kept, 0);
    drop(third);
    let memory = engine.frame_memory();
    assert_eq!(memory.idle, memory.taken);
}

#[test]
fn all_pieces_come_back_after_an_error() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, SMALL);
    for most in [1, 4] {
        assert!(tensors.encode_until(&engine, most).is_err());
        let memory = engine.frame_memory();
        assert!(memory.taken > 0 && memory.idle == memory.taken, "{memory:?}");
    }
    let frames = tensors.encode(&engine).unwrap();
    assert_eq!(tensors.check(&frames), frames.len());
    assert_eq!(engine.frame_memory().pieces, 2);
}

#[test]
fn threads_that_encode_at_once_share_the_memory() {
    let Some(gpu) = gpu() else { return };
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, SMALL);
    let (engine, tensors, start) = (&engine, &tensors, &Barrier::new(3));
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(move || {
                start.wait();
                for _ in 0..2 {
                    let frames = tensors.encode(engine).unwrap();
                    tensors.check(&frames);
                }
            });
        }
    });
    let memory = engine.frame_memory();
    assert!(memory.taken <= SMALL && memory.idle == memory.taken, "{memory:?}");
}

/// A forked child has no driver: it leaves the memory alone, even when it drops what its parent holds.
#[test]
#[cfg(target_os = "linux")]
fn a_fork_leaves_the_memory_to_its_parent() {
    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn _exit(status: i32) -> !;
        safe fn waitpid(process: i32, status: &mut i32, options: i32) -> i32;
    }
    let Some(gpu) = gpu() else { return };
    if !gpu.is_slow() {
        println!("skipped: no child may use a real driver");
        return;
    }
    let tensors = Tensors::new(&gpu);
    let engine = engine(&gpu, SMALL);
    let frames = tensors.encode(&engine).unwrap();
    match fork() {
        0 => {
            drop(frames);
            _exit(i32::from(engine.frame_memory().idle != 0));
        }
        child => {
            let mut status = -1;
            assert_eq!(waitpid(child, &mut status, 0), child);
            assert_eq!(status, 0);
        }
    }
    assert_eq!(tensors.check(&frames), frames.len());
    assert_eq!(engine.frame_memory().idle, 0);
    drop(frames);
    assert_eq!(engine.frame_memory().idle, 2 * PIECE);
}
