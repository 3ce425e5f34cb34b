//! Frames from pinned memory, and frames that threads fill in.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};
use s4_codec_gpu::GpuError;
use s4_engine::cuda::{Batch, CudaEngine, CudaError, CudaOptions, Pinned};
use s4_format::DType;
use s4_planes::patterns::{self, Kind};

use crate::support::{Encoded, Gpu, Host, Span, Upload, gpu, on_cpu};

/// Two tensors of several chunks.
fn tensors() -> (Vec<Host>, Vec<Encoded>) {
    let mut hosts = vec![];
    for (dtype, kind, n) in
        [(DType::BFloat16, Kind::BF16, 140_000), (DType::Float32, Kind::F32, 140_000)]
    {
        let data = patterns::all(kind, n).find(|p| p.0 == "like-weights").unwrap().1;
        hosts.push(Host::new(format!("{dtype}"), dtype, data));
    }
    let encoded = hosts.iter().map(|h| on_cpu(h, None)).collect();
    (hosts, encoded)
}

/// A span for each chunk, and the tensors' memory.
fn spans<'a>(gpu: &Gpu, hosts: &'a [Host], encoded: &'a [Encoded]) -> (Vec<Upload>, Vec<Span<'a>>) {
    let to: Vec<_> = hosts.iter().map(|h| gpu.upload(&vec![0xee; h.data.len()], 0)).collect();
    let mut spans = vec![];
    for (t, (host, e)) in hosts.iter().zip(encoded).enumerate() {
        let mut first = 0;
        for chunk in 0..e.chunks.len() {
            let bytes = host.chunk_bytes(&e.plan, chunk as u64);
            let to = to[t].memory().part(first, bytes).unwrap();
            let mut span = Span::default();
            let destination = s4_engine::cuda::Destination { from: 0, to };
            span.add(t, e.spec(host), chunk, e, bytes, vec![destination]);
            spans.push(span);
            first += bytes;
        }
    }
    assert!(spans.len() > 4, "{} chunks: fewer than slots", spans.len());
    (to, spans)
}

fn arrived(gpu: &Gpu, hosts: &[Host], to: &[Upload]) {
    for (host, to) in hosts.iter().zip(to) {
        assert!(gpu.download(to.address, to.bytes) == host.data, "{}", host.name);
    }
}

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Decodes spans that the threads of a pool fill in; `at` gets the index and offset of each part before it is filled.
fn fed(
    engine: &CudaEngine,
    to: &[Upload],
    spans: Vec<Span<'_>>,
    pool: Option<&ThreadPool>,
    at: impl Fn(usize, usize) -> Result<(), CudaError> + Sync,
) -> (Result<(), CudaError>, Vec<usize>) {
    let memory: Vec<_> = to.iter().map(Upload::memory).collect();
    let (bytes, jobs): (Vec<_>, Vec<_>) = spans.into_iter().map(|s| (s.bytes, s.jobs)).unzip();
    let mut queued = vec![];
    let done = engine.decode::<CudaError>(&memory, None, |decoder| {
        let batches = jobs.into_iter().zip(&bytes);
        let batches = batches.map(|(jobs, b)| Batch { ordinal: 0, len: b.len(), jobs });
        let fill = |span: usize, first: usize, part: &mut [u8]| {
            at(span, first)?;
            // Threads share the bytes evenly.
            let is_last = first + part.len() == bytes[span].len();
            assert!(part.len() <= 5000 && (part.len() >= 2500 || is_last), "{}", part.len());
            assert!(pool.is_some() || is_last || part.len() == 5000);
            part.copy_from_slice(&bytes[span][first..first + part.len()]);
            Ok(())
        };
        decoder.push_all(pool, batches, 5000, fill, |span| {
            queued.push(span);
            Ok(())
        })
    });
    (done, queued)
}

#[test]
fn frames_that_threads_fill_in_are_decoded() {
    let Some(gpu) = gpu() else { return };
    let (hosts, encoded) = tensors();
    let engine = gpu.engine(CudaOptions::default());
    for pool in [None, Some(pool(3)), Some(pool(1))] {
        let (to, spans) = spans(&gpu, &hosts, &encoded);
        let count = spans.len();
        let (done, queued) = fed(&engine, &to, spans, pool.as_ref(), |_, _| Ok(()));
        done.unwrap();
        assert_eq!(queued, Vec::from_iter(0..count));
        arrived(&gpu, &hosts, &to);
    }
}

#[test]
fn what_a_thread_fails_with_is_told_and_nothing_follows() {
    let Some(gpu) = gpu() else { return };
    let (hosts, encoded) = tensors();
    let engine = gpu.engine(CudaOptions::default());
    let pool = pool(3);
    for pool in [None, Some(&pool)] {
        let (to, spans) = spans(&gpu, &hosts, &encoded);
        let (done, queued) = fed(&engine, &to, spans, pool, |span, first| match (span, first) {
            (2, 2500..) => Err(GpuError::Argument("no such part".into()).into()),
            _ => Ok(()),
        });
        assert_eq!(done.unwrap_err().to_string(), "no such part");
        assert_eq!(queued, [0, 1]);
    }
    // The engine still works.
    let (to, spans) = spans(&gpu, &hosts, &encoded);
    fed(&engine, &to, spans, Some(&pool), |_, _| Ok(())).0.unwrap();
    arrived(&gpu, &hosts, &to);
}

#[test]
fn a_pool_whose_only_thread_decodes_is_not_waited_for() {
    let Some(gpu) = gpu() else { return };
    let (hosts, encoded) = tensors();
    let engine = gpu.engine(CudaOptions::default());
    let pool = pool(1);
    let (to, spans) = spans(&gpu, &hosts, &encoded);
    pool.install(|| fed(&engine, &to, spans, Some(&pool), |_, _| Ok(()))).0.unwrap();
    arrived(&gpu, &hosts, &to);
}

#[test]
fn a_panic_of_a_thread_is_passed_on() {
    let Some(gpu) = gpu() else { return };
    let (hosts, encoded) = tensors();
    let engine = gpu.engine(CudaOptions::default());
    let pool = pool(3);
    let (to, all) = spans(&gpu, &hosts, &encoded);
    let decode = AssertUnwindSafe(|| {
        fed(&engine, &to, all, Some(&pool), |span, _| match span {
            3 => panic!("a part that cannot be read"),
            _ => Ok(()),
        })
    });
    let told = std::panic::catch_unwind(decode).unwrap_err();
    assert_eq!(told.downcast_ref(), Some(&"a part that cannot be read"));
    // The engine still works.
    let (to, all) = spans(&gpu, &hosts, &encoded);
    fed(&engine, &to, all, Some(&pool), |_, _| Ok(())).0.unwrap();
    arrived(&gpu, &hosts, &to);
}

/// Decodes spans that lie in one pinned memory, the first at byte 32; `spoil` may change them.
fn from_pinned(
    gpu: &Gpu,
    engine: &CudaEngine,
    to: &[Upload],
    spans: Vec<Span<'_>>,
    spoil: impl FnOnce(&mut [u8]),
) -> Result<(), CudaError> {
    let memory: Vec<_> = to.iter().map(Upload::memory).collect();
    let mut all = vec![0; 32];
    let mut batches = vec![];
    for span in spans {
        let at = all.len();
        batches.push((at, Batch { ordinal: 0, len: span.bytes.len(), jobs: span.jobs }));
        all.extend(span.bytes);
        all.resize(all.len().next_multiple_of(16), 0);
    }
    spoil(&mut all);
    let pinned = Arc::new(Pinned::new(&gpu.device, all.len()).unwrap());
    // SAFETY: memory of this test alone.
    unsafe { pinned.slice_mut(0, all.len()) }.copy_from_slice(&all);
    engine.decode::<CudaError>(&memory, None, |decoder| {
        let outside = Batch { ordinal: 0, len: 100, jobs: vec![] };
        let refused = decoder.push_pinned(outside, &pinned, all.len() - 99).unwrap_err();
        assert!(matches!(refused, CudaError::Gpu(GpuError::Argument(_))), "{refused}");
        batches.into_iter().try_for_each(|(at, batch)| decoder.push_pinned(batch, &pinned, at))
    })
}

#[test]
fn pinned_frames_are_decoded_where_they_are() {
    let Some(gpu) = gpu() else { return };
    let (hosts, encoded) = tensors();
    let engine = gpu.engine(CudaOptions::default());
    let (to, all) = spans(&gpu, &hosts, &encoded);
    from_pinned(&gpu, &engine, &to, all, |_| ()).unwrap();
    arrived(&gpu, &hosts, &to);
    // A damaged frame is found, on the device and again on the CPU, where it lies.
    let (to, all) = spans(&gpu, &hosts, &encoded);
    let first = all[0].bytes.len().next_multiple_of(16);
    let wrong = from_pinned(&gpu, &engine, &to, all, |bytes| bytes[32 + first + 200] ^= 1);
    let wrong = wrong.unwrap_err().to_string();
    assert!(wrong.contains("chunk 1"), "{wrong}");
}
