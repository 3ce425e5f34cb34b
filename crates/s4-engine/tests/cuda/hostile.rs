//! Damaged frames whose checksums were mended: the device says what the CPU says, and writes nowhere
//! else.

use s4_engine::cuda::{CudaError, CudaOptions, Destination, FrameJob};
use s4_engine::{CpuEngine, Scratch};
use s4_format::layout::Planes;
use s4_format::{ChunkRecord, DType, StreamEntry};
use s4_planes::Simd;
use s4_planes::patterns::{self, Kind};

use crate::support::{Encoded, Host, gpu, on_cpu};

/// A damaged frame, with its record.
struct Damaged {
    source: usize,
    frame: Vec<u8>,
    record: ChunkRecord,
}

/// Numbers without a pattern.
fn noise(mut x: u64) -> impl Iterator<Item = u64> {
    std::iter::repeat_with(move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x >> 33
    })
}

/// Damages a frame in one of several ways, and mends its first checksum.
fn damage(
    source: usize,
    host: &Host,
    e: &Encoded,
    random: &mut impl Iterator<Item = u64>,
) -> Damaged {
    let mut next = |below: usize| random.next().unwrap_or(0) as usize % below.max(1);
    let mut frame = e.chunks[0].1.clone();
    let planes = Planes::new(e.plan.plan.layout, host.dtype.value_width(), 0).unwrap();
    let planes = planes.sizes().len();
    // Most damage where the structure is: the header, and the start of the streams.
    let near = StreamEntry::header_len(planes) + 160;
    match next(6) {
        0 => frame.truncate(next(frame.len())),
        1 => {
            let at = next(frame.len());
            frame[at] ^= 1 << next(8);
        }
        2 | 3 => {
            let at = next(near.min(frame.len()));
            frame[at] = next(256) as u8;
        }
        4 => {
            let (at, len) = (next(frame.len()), next(64));
            let end = (at + len).min(frame.len());
            frame[at..end].fill(next(256) as u8);
        }
        _ => {
            // A length of the header, so that the streams still fill the frame.
            let at = 8 * next(planes) + 4;
            let len = next(frame.len() + 40) as u32;
            frame[at..at + 4].copy_from_slice(&len.to_le_bytes());
        }
    }
    let mut record = e.record(0);
    record.len = u32::try_from(frame.len()).unwrap();
    if let Ok(streams) = StreamEntry::parse_chunk(&frame, planes) {
        record.crc_encoded = streams.crc();
    }
    Damaged { source, frame, record }
}

fn sources(n: usize) -> Vec<Host> {
    let mut out = vec![];
    for (dtype, kind) in [
        (DType::BFloat16, Kind::BF16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
        (DType::Int32, Kind::int(s4_planes::Width::B4)),
        (DType::Float8E4M3Fn, Kind::F8_E4M3),
    ] {
        for pattern in ["like-weights", "like-squares", "sparse", "counting", "two-values"] {
            if let Some((_, data)) = patterns::all(kind, n).find(|p| p.0 == pattern) {
                out.push(Host::new(format!("{dtype} {pattern}"), dtype, data));
            }
        }
    }
    out
}

#[test]
fn damaged_frames_with_mended_checksums_are_judged_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let rounds = std::env::var("S4_FUZZ_ROUNDS").ok().and_then(|r| r.parse().ok());
    let rounds = rounds.unwrap_or(if gpu.is_slow() { 4 } else { 400 });
    let hosts = sources(if gpu.is_slow() { 700 } else { 20_000 });
    let encoded: Vec<_> = hosts.iter().map(|h| on_cpu(h, None)).collect();
    let mut random = noise(2026);
    let mut all = vec![];
    for (i, (host, e)) in hosts.iter().zip(&encoded).enumerate() {
        if !e.chunks[0].0.plain {
            all.extend((0..rounds).map(|_| damage(i, host, e, &mut random)));
        }
    }
    // Good frames after them, so that all of them are looked at.
    all.extend((0..8).map(|_| Damaged {
        source: 0,
        frame: encoded[0].chunks[0].1.clone(),
        record: encoded[0].record(0),
    }));
    assert!(all.len() > 20, "{} frames", all.len());
    let outcome = decode_all(&gpu, &hosts, &encoded, &all);
    let cpu = CpuEngine::new(Simd::detect());
    let mut scratch = Scratch::default();
    let (mut good, mut bad) = (0, 0);
    for (i, d) in all.iter().enumerate() {
        let (host, e) = (&hosts[d.source], &encoded[d.source]);
        let mut values = vec![0; host.data.len()];
        let spec = e.spec(host);
        let said = cpu.decode(
            &s4_engine::DecodeJob {
                spec: &spec,
                chunk: 0,
                record: &d.record,
                frame: &d.frame,
                inputs: &[],
            },
            &mut scratch,
            &mut values,
        );
        match (&said, &outcome[i]) {
            (Ok(()), Ok(found)) => assert!(*found == host.data, "{} {i}", host.name),
            (Err(a), Err(CudaError::Format { source, .. })) => assert_eq!(a, source),
            (a, b) => {
                panic!("{} {i}: the CPU says {a:?}, the device {:?}", host.name, b.as_ref().err())
            }
        }
        *if said.is_ok() { &mut good } else { &mut bad } += 1;
    }
    println!("{bad} frames refused, {good} decoded");
    assert!(bad > all.len() / 2 && good >= 8);
}

const GUARD: usize = 64;

/// Decodes each frame into a place of its own with guards on both sides.
fn decode_all(
    gpu: &crate::support::Gpu,
    hosts: &[Host],
    encoded: &[Encoded],
    all: &[Damaged],
) -> Vec<Result<Vec<u8>, CudaError>> {
    let mut places = vec![];
    let mut end = 0;
    for d in all {
        places.push(end + GUARD);
        end = (end + hosts[d.source].data.len() + 2 * GUARD).next_multiple_of(8);
    }
    let to = gpu.upload(&vec![0xee; end], 0);
    let engine = gpu.engine(CudaOptions::default());
    let mut errors: Vec<Option<CudaError>> = all.iter().map(|_| None).collect();
    engine
        .decode::<CudaError>(&[to.memory()], None, |decoder| {
            for (i, d) in all.iter().enumerate() {
                let bytes = hosts[d.source].data.len() as u64;
                let job = FrameJob {
                    tensor: i,
                    spec: encoded[d.source].spec(&hosts[d.source]),
                    chunk: 0,
                    record: d.record,
                    at: 0,
                    bytes,
                    destinations: vec![Destination {
                        from: 0,
                        to: to.memory().part(places[i] as u64, bytes)?,
                    }],
                    input: None,
                    moments: None,
                };
                // An error may belong to an earlier frame: then this one was not taken.
                for attempt in 0.. {
                    let pushed = decoder.push(0, d.frame.len(), vec![job.clone()], |to| {
                        to.copy_from_slice(&d.frame);
                        Ok::<(), CudaError>(())
                    });
                    match pushed {
                        Ok(()) => break,
                        Err(CudaError::Format { tensor, source }) => {
                            errors[tensor] = Some(CudaError::Format { tensor, source });
                            if tensor == i {
                                break;
                            }
                        }
                        Err(e) => return Err(e),
                    }
                    assert!(attempt < 8, "frame {i} is never taken");
                }
            }
            Ok(())
        })
        .unwrap();
    let found = gpu.download(to.address, to.bytes);
    let mut at = 0;
    for (d, place) in all.iter().zip(&places) {
        let len = hosts[d.source].data.len();
        assert!(found[at..*place].iter().all(|b| *b == 0xee), "written in front of {place}");
        at = place + len;
    }
    assert!(found[at..].iter().all(|b| *b == 0xee), "written after the last frame");
    let value = |(i, e): (usize, Option<CudaError>)| match e {
        Some(e) => Err(e),
        None => {
            let len = hosts[all[i].source].data.len();
            Ok(found[places[i]..places[i] + len].to_vec())
        }
    };
    errors.into_iter().enumerate().map(value).collect()
}
