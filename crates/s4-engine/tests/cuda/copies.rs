//! Rounded copies of wider tensors: the CPU's frames, wherever the wider values are, made and read by the kernels alone.

use bytes::Bytes;
use s4_engine::cuda::{CudaEngine, CudaError, CudaOptions, Destination, FrameJob};
use s4_engine::{
    CpuEngine, DecodeJob, EncodeJob, Engine, Input, InputSize, InputValues, Inputs, Jobs,
    PlaneCoding, Scratch, TensorPlan, chunk_log2,
};
use s4_format::{DType, LayoutId, Plan, crc32c};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd};

use crate::support::{Encoded, Gpu, Host, Upload, compare, gpu};

/// A tensor, what it is a copy of, and the CPU's frames of it.
struct Copy {
    host: Host,
    wide: Vec<u8>,
    coded: Encoded,
}

/// The place of the wider values.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Given {
    Device,
    Stored,
    /// As `Stored`, in memory that nobody changes, as the copies are.
    Fixed,
    /// On the device, and no longer what was stored.
    Changed,
    Host,
    /// On the host, and no longer what was stored.
    Gone,
}

impl Copy {
    fn new(name: &str, dtype: DType, wide: &[u8], plan: TensorPlan) -> Self {
        let mut data = vec![0; wide.len() / 2];
        match dtype {
            DType::BFloat16 => Kernels::default().to_bf16(wide, &mut data),
            _ => Kernels::default().to_fp16(wide, &mut data),
        }
        // Some values are not copies.
        data.chunks_exact_mut(2).skip(7).step_by(911).for_each(|x| x[0] ^= 3);
        let name = format!("{dtype} {name} {} {}", data.len() / 2, plan.plan.layout);
        let host = Host::new(name, dtype, data);
        let coded = on_cpu(&host, wide, plan);
        Self { host, wide: wide.to_vec(), coded }
    }

    /// The bytes of the wider values of a chunk.
    fn range(&self, chunk: u64) -> std::ops::Range<usize> {
        let first = (chunk as usize * 4) << self.coded.plan.chunk_log2;
        first..first + 2 * self.host.chunk_bytes(&self.coded.plan, chunk) as usize
    }
}

fn on_cpu(host: &Host, wide: &[u8], plan: TensorPlan) -> Encoded {
    let (cpu, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
    let view = host.view();
    let size = 4usize << plan.chunk_log2;
    let chunk = |(chunk, wide): (u64, &[u8])| {
        let mut frame = vec![];
        let job = EncodeJob { view: &view, plan: &plan, chunk, inputs: &[wide] };
        (cpu.encode(&job, &mut scratch, &mut frame).unwrap(), frame)
    };
    let chunks = (0..).zip(wide.chunks(size)).map(chunk).collect();
    Encoded::new(plan, chunks)
}

fn plan(dtype: DType, layout: LayoutId, planes: &[PlaneCoding]) -> TensorPlan {
    TensorPlan::new(Plan::cast(layout, 3), planes.to_vec(), chunk_log2(dtype))
}

/// Every layout and coding, chunks of all sizes, and values that round to anything.
fn copies(sizes: &[usize]) -> Vec<Copy> {
    let (p8, p12, raw) = (PlaneCoding::RANS8, PlaneCoding::RANS12, PlaneCoding::RAW);
    let mut out = vec![];
    for dtype in [DType::BFloat16, DType::Float16] {
        for &n in sizes {
            for pattern in ["like-weights", "weights-and-nans", "random", "zeros"] {
                let wide = patterns::all(Kind::F32, n).find(|p| p.0 == pattern).unwrap().1;
                for (layout, planes) in [
                    (LayoutId::FIELDS, &[p8, p8][..]),
                    (LayoutId::FIELDS_SIGN, &[p12, p8, PlaneCoding::BITS7]),
                    (LayoutId::BYTES, &[raw, p12]),
                ] {
                    out.push(Copy::new(pattern, dtype, &wide, plan(dtype, layout, planes)));
                }
            }
        }
    }
    out
}

struct Wider<'a> {
    copies: &'a [Copy],
    uploads: Vec<Upload>,
    given: Given,
}

impl<'a> Wider<'a> {
    fn new(gpu: &Gpu, copies: &'a [Copy], given: Given) -> Self {
        let uploads = match given {
            Given::Host | Given::Gone => vec![],
            _ => (0..).zip(copies).map(|(i, c)| gpu.upload(&c.wide, i % 3 * 4)).collect(),
        };
        Self { copies, uploads, given }
    }
}

impl Inputs<CudaError> for Wider<'_> {
    fn memory(&self) -> Vec<s4_engine::DeviceMemory> {
        self.uploads.iter().map(Upload::memory).collect()
    }

    fn size(&self, tensor: usize, chunk: u64) -> InputSize {
        let bytes = match self.given {
            Given::Host | Given::Gone => self.copies[tensor].range(chunk).len() as u64,
            _ => 0,
        };
        InputSize { bytes, frames: 0 }
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
        let one = |&(tensor, chunk): &(usize, u64)| {
            let range = self.copies[tensor].range(chunk);
            let values = &self.copies[tensor].wide[range.clone()];
            let fixed = self.given == Given::Fixed;
            let there =
                |u: &Upload| u.memory_as(fixed).part(range.start as u64, range.len() as u64);
            Ok(match self.given {
                Given::Device => Input::Device(there(&self.uploads[tensor])?),
                Given::Stored | Given::Fixed | Given::Changed => {
                    let wrong = u32::from(self.given == Given::Changed);
                    let parts = values.chunks(256 << 10);
                    let parts = parts.map(|p| (p.len() as u64, crc32c(p) ^ wrong)).collect();
                    Input::Stored { values: there(&self.uploads[tensor])?, parts }
                }
                Given::Host => Input::Host(Bytes::copy_from_slice(values)),
                Given::Gone => Input::Host(Bytes::new()),
            })
        };
        chunks.iter().map(one).collect()
    }
}

fn encode(gpu: &Gpu, engine: &CudaEngine, copies: &[Copy], given: Given) -> Vec<Encoded> {
    let uploads: Vec<_> =
        (0..).zip(copies).map(|(i, c)| gpu.upload(&c.host.data, i % 3 * 2)).collect();
    let fixed = given == Given::Fixed;
    let tensors: Vec<_> =
        copies.iter().zip(&uploads).map(|(c, u)| c.host.on_as(u, fixed)).collect();
    let plans: Vec<_> = copies.iter().map(|c| c.coded.plan.clone()).collect();
    let inputs = Wider::new(gpu, copies, given);
    let mut chunks: Vec<Vec<_>> = copies.iter().map(|_| vec![]).collect();
    let done = engine.encode(&Jobs { inputs: &inputs, ..Jobs::new(&tensors, &plans) }, |frames| {
        for frame in frames {
            assert_eq!(frame.chunk, chunks[frame.tensor].len() as u64);
            chunks[frame.tensor].push((frame.encoded, frame.bytes.to_vec()));
        }
        Ok(())
    });
    done.unwrap();
    plans.into_iter().zip(chunks).map(|(p, c)| Encoded::new(p, c)).collect()
}

/// Decodes the CPU's frames on the device; `given`: with the wider values in place. Also returns
/// what was left undone.
fn decode(
    gpu: &Gpu,
    engine: &CudaEngine,
    copies: &[Copy],
    given: bool,
) -> (Vec<Vec<u8>>, Vec<usize>) {
    let wide: Vec<_> = (0..).zip(copies).map(|(i, c)| gpu.upload(&c.wide, i % 3 * 4)).collect();
    let to: Vec<_> = (0..)
        .zip(copies)
        .map(|(i, c)| gpu.upload(&vec![0xee; c.host.data.len()], i % 3 * 2))
        .collect();
    let memory: Vec<_> = to.iter().chain(&wide).map(Upload::memory).collect();
    let mut undone = vec![];
    let done = engine.decode::<CudaError>(&memory, None, |decoder| {
        for (tensor, c) in copies.iter().enumerate() {
            let mut first = 0;
            for (chunk, (_, frame)) in c.coded.chunks.iter().enumerate() {
                let bytes = c.host.chunk_bytes(&c.coded.plan, chunk as u64);
                let input = wide[tensor].memory().part(2 * first, 2 * bytes)?;
                let job = FrameJob {
                    tensor,
                    spec: c.coded.spec(&c.host),
                    chunk: chunk as u64,
                    record: c.coded.record(chunk),
                    at: 0,
                    bytes,
                    destinations: vec![Destination {
                        from: 0,
                        to: to[tensor].memory().part(first, bytes)?,
                    }],
                    input: given.then_some(input),
                    moments: None,
                };
                first += bytes;
                decoder.push::<CudaError>(gpu.device.ordinal(), frame.len(), vec![job], |to| {
                    to.copy_from_slice(frame);
                    Ok(())
                })?;
            }
        }
        undone = decoder.undone()?;
        Ok(())
    });
    done.unwrap();
    (to.iter().map(|u| gpu.download(u.address, u.bytes)).collect(), undone)
}

fn sizes(gpu: &Gpu) -> &'static [usize] {
    if gpu.is_slow() { &[1, 300, 9001] } else { &[1, 300, 9001, 140_003, 600_000] }
}

#[test]
fn copies_are_as_on_the_cpu_wherever_the_wider_values_are() {
    let Some(gpu) = gpu() else { return };
    let mut all = copies(sizes(&gpu));
    // Chunks whose input is two chunks of the wider tensor.
    let wide = patterns::all(Kind::F32, 140_001).find(|p| p.0 == "like-weights").unwrap().1;
    let planes = [PlaneCoding::RANS8; 2];
    let large = plan(DType::BFloat16, LayoutId::FIELDS, &planes);
    all.push(Copy::new("large", DType::BFloat16, &wide, large));
    for given in [Given::Device, Given::Stored, Given::Fixed, Given::Host] {
        for scratch in [16 << 20, 256 << 20] {
            let engine = gpu.engine(CudaOptions { scratch, ..CudaOptions::default() });
            for (copy, e) in all.iter().zip(encode(&gpu, &engine, &all, given)) {
                assert_eq!(compare(&copy.host, &e, &copy.coded), None, "{given:?}");
            }
            let chunks = engine.chunks();
            assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
        }
    }
    let engine = gpu.engine(CudaOptions::default());
    let (values, undone) = decode(&gpu, &engine, &all, true);
    assert_eq!(undone, [0; 0]);
    for (copy, values) in all.iter().zip(values) {
        assert!(values == copy.host.data, "{}", copy.host.name);
    }
    assert_eq!(engine.chunks().host + engine.chunks().refused, 0);
}

/// Values that a reader would not have are not predicted from.
#[test]
fn copies_of_values_that_changed_are_stored_as_they_are() {
    let Some(gpu) = gpu() else { return };
    let all = copies(&[300, 9001]);
    for given in [Given::Changed, Given::Gone] {
        let engine = gpu.engine(CudaOptions::default());
        for (copy, e) in all.iter().zip(encode(&gpu, &engine, &all, given)) {
            for (said, frame) in &e.chunks {
                assert!(said.plain && said.crc_raw == crc32c(&copy.host.data), "{given:?}");
                assert!(*frame == copy.host.data, "{given:?} {}", copy.host.name);
            }
        }
        assert_eq!(engine.chunks().refused, 0);
    }
}

/// A copy whose wider values are missing is left to the caller, and never decoded to something else.
#[test]
fn copies_without_the_wider_values_are_left_undone() {
    let Some(gpu) = gpu() else { return };
    let all = copies(&[300, 9001]);
    let engine = gpu.engine(CudaOptions::default());
    let (_, undone) = decode(&gpu, &engine, &all, false);
    let coded = |c: &Copy| !c.coded.chunks[0].0.plain;
    let expected: Vec<_> =
        all.iter().enumerate().filter(|(_, c)| coded(c)).map(|(i, _)| i).collect();
    assert_eq!(undone, expected);
    assert!(!undone.is_empty());
    // The CPU reads the same frames.
    let (cpu, mut scratch) = (CpuEngine::new(Simd::detect()), Scratch::default());
    for c in &all {
        let mut values = vec![0; c.host.data.len()];
        let (spec, record) = (c.coded.spec(&c.host), c.coded.record(0));
        let inputs = &[InputValues::Slice(&c.wide)];
        let frame = &c.coded.chunks[0].1;
        let job = DecodeJob { spec: &spec, chunk: 0, record: &record, frame, inputs };
        cpu.decode(&job, &mut scratch, &mut values).unwrap();
        assert!(values == c.host.data, "{}", c.host.name);
    }
}
