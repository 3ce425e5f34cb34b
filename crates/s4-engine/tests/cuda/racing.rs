//! Values that change while the device encodes them: every frame decodes, to what each value was at some
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use s4_codec_gpu::{Cuda, Pinned, Stream};
use s4_engine::cuda::{CudaError, CudaOptions};
use s4_engine::{
    CpuEngine, DecodeJob, Engine, Input, InputSize, InputValues, Inputs, Jobs, ParentSample,
    PlanJob, Preset, Scratch, TensorPlan, parent_probes,
};
use s4_format::{DType, Digest, PredictorId};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Simd, Width};

use crate::support::{Encoded, Gpu, Host, Upload, gpu, on_gpu};

/// A tensor, and the two versions that its values change between.
pub(crate) struct Racing {
    pub(crate) host: Host,
    pub(crate) upload: Upload,
    pub(crate) other: Vec<u8>,
}

impl Racing {
    /// Tensors of every route through the kernels.
    pub(crate) fn all(gpu: &Gpu) -> Vec<Self> {
        let n = if gpu.is_slow() { 40_000 } else { 2_000_000 };
        let of = |i: u64, dtype: DType, kind: Kind, names: [&str; 2]| {
            let data = |name| patterns::all(kind, n).find(|p| p.0 == name).unwrap().1;
            let host = Host::new(format!("{dtype} {names:?}"), dtype, data(names[0]));
            let skew = i % 3 * dtype.value_width() as u64;
            Self { upload: gpu.upload(&host.data, skew), host, other: data(names[1]) }
        };
        vec![
            of(0, DType::BFloat16, Kind::BF16, ["like-weights", "like-squares"]),
            of(1, DType::Float32, Kind::F32, ["like-weights", "every-exponent"]),
            of(2, DType::Float64, Kind::F64, ["like-squares", "like-weights"]),
            of(3, DType::Float32, Kind::F32, ["zeros", "like-weights"]),
            of(4, DType::Int32, Kind::int(Width::B4), ["counting", "sparse"]),
            of(5, DType::UInt8, Kind::int(Width::B1), ["random", "runs"]),
        ]
    }

    /// Whether each value is one that it had at some time. (The emulator copies byte by byte.)
    pub(crate) fn had(&self, gpu: &Gpu, values: &[u8]) -> bool {
        let unit = if gpu.is_slow() { 1 } else { self.host.dtype.value_width() };
        let both = self.host.data.chunks(unit).zip(self.other.chunks(unit));
        values.len() == self.other.len()
            && values.chunks(unit).zip(both).all(|(v, (a, b))| v == a || v == b)
    }
}

/// Runs `work` while another thread changes the values on the device.
pub(crate) fn while_changing(gpu: &Gpu, tensors: &[Racing], work: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            if gpu.is_slow() { churn_here(tensors, &stop) } else { churn(gpu, tensors, &stop) }
        });
        let _stop = Stop(&stop);
        work();
    });
}

/// The place where a tensor is changed next, in bytes, and its next version.
fn places<'a>(tensors: &'a [Racing]) -> impl FnMut() -> (&'a Racing, &'a [u8], usize, usize) {
    let mut state = 1u64;
    move || {
        let mut random = |below: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as usize % below
        };
        let t = &tensors[random(tensors.len())];
        let version = if random(2) == 0 { &t.host.data } else { &t.other };
        let width = t.host.dtype.value_width();
        let first = random(version.len() / width) * width;
        let len = (1 + random(20_000)) * width;
        (t, version, first, len.min(version.len() - first))
    }
}

/// The emulated device's memory is the host's.
fn churn_here(tensors: &[Racing], stop: &AtomicBool) {
    let mut next = places(tensors);
    while !stop.load(Ordering::Relaxed) {
        let (t, version, first, len) = next();
        let to = t.upload.address + first as u64;
        // SAFETY: bytes of the upload. Others read them meanwhile, which is what is tested.
        unsafe { std::ptr::copy(version[first..].as_ptr(), to as *mut u8, len) };
    }
}

fn churn(gpu: &Gpu, tensors: &[Racing], stop: &AtomicBool) {
    let stream = Stream::new(&gpu.device).unwrap();
    let most = tensors.iter().map(|t| t.other.len()).max().unwrap();
    let pinned = Pinned::new(&gpu.device, most).unwrap();
    let mut next = places(tensors);
    while !stop.load(Ordering::Relaxed) {
        let (t, version, first, len) = next();
        // SAFETY: nothing is in flight on the pinned memory; the rest as above.
        unsafe {
            pinned.slice_mut(0, len).copy_from_slice(&version[first..first + len]);
            stream.copy_to_device(&pinned, 0, len, t.upload.address + first as u64).unwrap();
        }
        stream.synchronize().unwrap();
    }
}

fn check(gpu: &Gpu, tensors: &[Racing], encoded: &[Encoded], parents: Option<&[Vec<u8>]>) {
    let (cpu, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
    for (i, (t, e)) in tensors.iter().zip(encoded).enumerate() {
        let mut values = parents.map_or_else(|| vec![0; t.other.len()], |p| p[i].clone());
        let mut rest = values.as_mut_slice();
        for (chunk, (_, frame)) in e.chunks.iter().enumerate() {
            let len = t.host.chunk_bytes(&e.plan, chunk as u64) as usize;
            let (to, behind) = rest.split_at_mut(len);
            rest = behind;
            let (spec, record) = (e.spec(&t.host), e.record(chunk));
            let done = cpu.decode(
                &DecodeJob {
                    spec: &spec,
                    chunk: chunk as u64,
                    record: &record,
                    frame,
                    inputs: &[InputValues::Destination],
                },
                &mut scratch,
                to,
            );
            done.unwrap_or_else(|e| panic!("{}: {e}", t.host.name));
        }
        assert!(t.had(gpu, &values), "{}: a value that never was", t.host.name);
    }
}

#[test]
fn frames_of_changing_values_decode() {
    let Some(gpu) = gpu() else { return };
    let tensors = Racing::all(&gpu);
    let engine = gpu.engine(CudaOptions { scratch: 64 << 20, ..CudaOptions::default() });
    let (hosts, uploads): (Vec<_>, Vec<_>) =
        tensors.iter().map(|t| (t.host.clone(), &t.upload)).unzip();
    while_changing(&gpu, &tensors, || {
        for _ in 0..if gpu.is_slow() { 6 } else { 60 } {
            let encoded = on_gpu(&engine, &hosts, &uploads, None).unwrap();
            check(&gpu, &tensors, &encoded, None);
        }
    });
    if gpu.is_slow() {
        assert_eq!(engine.chunks().refused, 0);
    }
}

/// The parents' values, in the memory of the host.
struct Parents<'a>(&'a [TensorPlan], &'a [Racing], Vec<Vec<u8>>);

impl Parents<'_> {
    fn values(&self, tensor: usize, chunk: u64) -> &[u8] {
        let plan = &self.0[tensor];
        let host = &self.1[tensor].host;
        let first = (chunk as usize * host.dtype.value_width()) << plan.chunk_log2;
        &self.2[tensor][first..first + host.chunk_bytes(plan, chunk) as usize]
    }
}

impl Inputs<CudaError> for Parents<'_> {
    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        InputSize { bytes: self.values(tensor, chunk).len() as u64, frames: 0 }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
        let values = |&(t, c): &(usize, u64)| Bytes::copy_from_slice(self.values(t, c));
        Ok(chunks.iter().map(|c| Input::Host(values(c))).collect())
    }
}

#[test]
fn frames_of_changing_differences_decode() {
    let Some(gpu) = gpu() else { return };
    let tensors = Racing::all(&gpu);
    let engine = gpu.engine(CudaOptions { scratch: 64 << 20, ..CudaOptions::default() });
    let (cpu, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
    let parents: Vec<_> = tensors.iter().map(|t| t.host.data.clone()).collect();
    // Planned while values and parents are the same: all are differences.
    let plan = |t: &Racing| {
        let width = t.host.dtype.value_width();
        let probes = parent_probes(t.host.dtype, (t.host.data.len() / width) as u64);
        let part = |r: std::ops::Range<u64>| {
            &t.host.data[r.start as usize * width..r.end as usize * width]
        };
        let sample: Vec<u8> = probes.into_iter().flat_map(part).copied().collect();
        let parent = ParentSample {
            manifest: Digest([7; 32]),
            tensor: 0,
            values: &sample,
            moments: &[],
            expected: None,
        };
        cpu.plan(
            &PlanJob { parent: Some(&parent), ..PlanJob::new(Preset::Fast, &t.host.view()) },
            &mut scratch,
        )
        .unwrap()
    };
    let plans: Vec<_> = tensors.iter().map(plan).collect();
    let deltas = plans.iter().filter(|p| p.plan.predictor == PredictorId::PARENT).count();
    assert!(deltas >= 4, "{deltas}");
    let on: Vec<_> = tensors.iter().map(|t| t.host.on(&t.upload)).collect();
    while_changing(&gpu, &tensors, || {
        for _ in 0..if gpu.is_slow() { 6 } else { 60 } {
            let given = Parents(&plans, &tensors, parents.clone());
            let mut chunks: Vec<Vec<_>> = tensors.iter().map(|_| vec![]).collect();
            let done =
                engine.encode(&Jobs { inputs: &given, ..Jobs::new(&on, &plans) }, |frames| {
                    for frame in frames {
                        chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
                    }
                    Ok(())
                });
            done.unwrap();
            let encoded: Vec<_> =
                plans.iter().cloned().zip(chunks).map(|(p, c)| Encoded::new(p, c)).collect();
            check(&gpu, &tensors, &encoded, Some(&parents));
        }
    });
}

/// However many threads ask for a device at the same time, its kernels are loaded once, and for as long as somebody
/// uses it.
#[test]
fn a_device_in_use_is_not_opened_again() {
    let Some(gpu) = gpu() else { return };
    let cuda = Cuda::discover().unwrap();
    let devices: Vec<_> = std::thread::scope(|scope| {
        let open = |cuda: Cuda| scope.spawn(move || cuda.device(0).unwrap());
        let threads: Vec<_> = (0..8).map(|_| open(cuda.clone())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(devices.iter().all(|device| Arc::ptr_eq(device, &devices[0])));
    let weak = Arc::downgrade(&devices[0]);
    drop(devices);
    assert!(weak.upgrade().is_none(), "nobody uses it any more");
    let again = cuda.device(0).unwrap();
    assert_eq!(again.info(), gpu.device.info());
}
