//! The CPU engine behind the trait that all engines have: the same plans and frames, with any threads, any
//! window, and wherever the values are that deltas are predicted from.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

use bytes::Bytes;
use rayon::{ThreadPool, ThreadPoolBuilder};
use s4_engine::{
    CpuEngine, DeviceMemory, EncodeJob, Engine, Input, InputFrame, InputSize, Inputs, Jobs,
    NoInputs, Preset, Scratch, TensorError, TensorPlan, TensorSpec, TensorValues, TensorView,
    parent_probes,
};
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType, Digest, Error};
use s4_planes::Simd;
use s4_planes::patterns::{self, Kind};

const PRESET: Preset = Preset::Fast;
const DTYPE: DType = DType::BFloat16;
/// Indices of a tensor and of its chunk, and the frame.
type Frame = (usize, u64, Vec<u8>);
/// A tensor's plan and side data, and the record and frame of each chunk.
type Coded = (TensorPlan, Side, Vec<(ChunkRecord, Vec<u8>)>);

fn weights(n: usize) -> Vec<u8> {
    patterns::all(Kind::BF16, n).into_iter().find(|p| p.0 == "like-weights").unwrap().1
}

/// Tensors of three chunks, one, and part of one, each with its values a step earlier.
fn tensors() -> Vec<[Vec<u8>; 2]> {
    let pair = |n| {
        let before = weights(n);
        let change = |(i, b): (usize, &u8)| b ^ u8::from(i.is_multiple_of(6));
        [before.iter().enumerate().map(change).collect(), before]
    };
    [300_000, 1 << 17, 5000].map(pair).into()
}

fn chunk(values: &[u8], chunk: u64) -> &[u8] {
    values.chunks(2 << s4_engine::chunk_log2(DTYPE)).nth(chunk as usize).unwrap()
}

/// The place of parents.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Given {
    Host,
    Late,
    Frames,
    Device,
    Nowhere,
}

struct Parents<'a> {
    tensors: &'a [[Vec<u8>; 2]],
    given: Given,
    coded: &'a [Coded],
}

impl Inputs<TensorError> for Parents<'_> {
    fn parent(&self, tensor: usize) -> Option<(Digest, u32)> {
        Some((Digest([7; 32]), tensor as u32))
    }

    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, TensorError> {
        let sample = |&i: &usize| {
            let values = &self.tensors[i][1];
            let probes = parent_probes(DTYPE, values.len() as u64 / 2).into_iter();
            probes
                .flat_map(|p| &values[2 * p.start as usize..2 * p.end as usize])
                .copied()
                .collect()
        };
        Ok(tensors.iter().map(sample).collect())
    }

    fn size(&self, _: usize, _: u64) -> InputSize {
        InputSize::default()
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, TensorError> {
        let one = |&(tensor, number): &(usize, u64)| {
            let values = chunk(&self.tensors[tensor][1], number);
            Ok(match self.given {
                Given::Host => Input::Host(Bytes::copy_from_slice(values)),
                Given::Late => Input::Late,
                Given::Frames => {
                    let (plan, side, frames) = &self.coded[tensor];
                    let (record, bytes) = frames[number as usize].clone();
                    let (shape, chunk_log2) = (&[][..], plan.chunk_log2);
                    let spec =
                        TensorSpec { dtype: DTYPE, shape, plan: &plan.plan, side, chunk_log2 };
                    Input::Frames(vec![InputFrame { spec, record, bytes: bytes.into() }])
                }
                // SAFETY: it is not used.
                Given::Device => Input::Device(unsafe { DeviceMemory::new(0, 0, 0, 0) }),
                Given::Nowhere => {
                    let source = Error::corrupt("gone").in_chunk(number);
                    return Err(TensorError { tensor, source });
                }
            })
        };
        chunks.iter().map(one).collect()
    }

    fn read<'b>(
        &'b self,
        tensor: usize,
        number: u64,
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], TensorError> {
        buffer.clear();
        buffer.extend_from_slice(chunk(&self.tensors[tensor][1], number));
        Ok(buffer)
    }
}

/// A tensor's frames, chunk by chunk.
fn alone(
    cpu: &CpuEngine,
    tensor: usize,
    [data, before]: &[Vec<u8>; 2],
    plan: &TensorPlan,
) -> Vec<(Frame, ChunkRecord)> {
    let (mut scratch, shape) = (Scratch::default(), [data.len() as u64 / 2]);
    let view = TensorView { dtype: DTYPE, shape: &shape, data };
    let one = |number: u64| {
        let mut frame = vec![];
        let parent = plan.plan.is_delta().then(|| chunk(before, number));
        let job = EncodeJob { view: &view, plan, chunk: number, inputs: parent.as_slice() };
        let e = cpu.encode(&job, &mut scratch, &mut frame).unwrap();
        let (len, plain) = (e.len as u32, e.plain);
        let (crc_encoded, crc_raw) = (e.crc_encoded, e.crc_raw);
        let record = ChunkRecord { offset: 0, object: 0, len, plain, crc_encoded, crc_raw };
        ((tensor, number, frame), record)
    };
    (0..data.len().div_ceil(2 << plan.chunk_log2) as u64).map(one).collect()
}

fn encode(cpu: &CpuEngine, jobs: &Jobs<'_, TensorError>) -> Result<Vec<Frame>, TensorError> {
    let mut frames = vec![];
    Engine::encode(cpu, jobs, |some| {
        for f in some {
            assert_eq!(f.encoded.len, f.bytes.len());
            frames.push((f.tensor, f.chunk, f.bytes.to_vec()));
        }
        Ok(())
    })?;
    Ok(frames)
}

#[test]
fn frames_do_not_depend_on_threads_windows_or_where_parents_are() {
    let cpu = CpuEngine::new(Simd::detect());
    let pairs = tensors();
    let shapes: Vec<_> = pairs.iter().map(|p| [p[0].len() as u64 / 2]).collect();
    let of = |side: usize| -> Vec<_> {
        let one = |(p, shape)| {
            let p: &[Vec<u8>; 2] = p;
            TensorValues::new(DTYPE, shape, &p[side])
        };
        pairs.iter().zip(&shapes).map(|(p, shape)| one((p, &shape[..]))).collect()
    };
    let (tensors, before) = (of(0), of(1));
    let plans = Engine::plan::<TensorError>(&cpu, PRESET, &before, &NoInputs, None).unwrap();
    let coded = plans.into_iter().zip(&pairs).map(|(plan, [_, before])| {
        let frames = alone(&cpu, 0, &[before.clone(), vec![]], &plan).into_iter();
        let frames = frames.map(|((_, _, bytes), record)| (record, bytes)).collect();
        (plan.clone(), plan.side_data(true).unwrap(), frames)
    });
    let coded: Vec<Coded> = coded.collect();
    let parents = |given| Parents { tensors: &pairs, given, coded: &coded };
    let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let planned = |pool| cpu_plans(&cpu, &tensors, &parents(Given::Late), pool);
    let plans = planned(None);
    assert_eq!(format!("{plans:?}"), format!("{:?}", planned(Some(&pool))));
    assert!(plans.iter().all(|p| p.plan.is_delta()), "{plans:?}");
    let expected: Vec<Frame> = (pairs.iter().zip(&plans).enumerate())
        .flat_map(|(i, (pair, plan))| alone(&cpu, i, pair, plan))
        .map(|frame| frame.0)
        .collect();
    assert_eq!(expected.len(), 5);
    for given in [Given::Host, Given::Late, Given::Frames] {
        for window in [0, 1, 2, 9] {
            for pool in [None, Some(&pool)] {
                let inputs = &parents(given);
                let jobs = Jobs { inputs, pool, window, ..Jobs::new(&tensors, &plans) };
                assert!(encode(&cpu, &jobs).unwrap() == expected, "{given:?}, {window}");
            }
        }
    }
    // An input that cannot be read is an error of the first chunk that needs it, and nothing follows it.
    for (given, what) in [
        (Given::Nowhere, "tensor 0: corrupt data (chunk 0): gone"),
        (Given::Device, "delta without its parent's values"),
    ] {
        let inputs = &parents(given);
        let jobs = Jobs { inputs, window: 2, ..Jobs::new(&tensors, &plans) };
        let mut handed = 0;
        let failed = Engine::encode(&cpu, &jobs, |_| {
            handed += 1;
            Ok(())
        });
        let failed = failed.unwrap_err().to_string();
        assert!(failed.contains(what) && handed == 0, "{failed}, {handed} frames");
    }
    let none = encode(&cpu, &Jobs::new(&tensors, &plans)).unwrap_err();
    assert!(none.to_string().contains("without its parent's values"), "{none}");
}

fn cpu_plans(
    cpu: &CpuEngine,
    tensors: &[TensorValues<'_>],
    inputs: &Parents<'_>,
    pool: Option<&ThreadPool>,
) -> Vec<TensorPlan> {
    Engine::plan(cpu, PRESET, tensors, inputs, pool).unwrap()
}

#[test]
fn an_error_of_the_sink_ends_the_work_and_what_does_not_fit_is_refused() {
    let cpu = CpuEngine::new(Simd::detect());
    let data = weights(1 << 18);
    let tensor = TensorValues::new(DTYPE, &[1 << 18], &data);
    let plans = Engine::plan::<TensorError>(&cpu, PRESET, &[tensor], &NoInputs, None).unwrap();
    let tensors = [tensor];
    let mut handed = 0;
    let enough = TensorError { tensor: 9, source: Error::limit("enough") };
    let ended = Engine::encode(&cpu, &Jobs::new(&tensors, &plans), |_| {
        handed += 1;
        Err(enough.clone())
    });
    assert_eq!((ended, handed), (Err(enough), 1));
    let wrong = |tensor: TensorValues<'_>, plans: &[TensorPlan]| {
        encode(&cpu, &Jobs::new(&[tensor], plans)).unwrap_err().to_string()
    };
    let shape = wrong(TensorValues { shape: &[3], ..tensor }, &plans);
    assert!(shape.contains("524288 bytes of values do not match shape [3]"), "{shape}");
    assert!(wrong(tensor, &[]).contains("0 plans for 1 tensors"));
    for shape in [&[1 << 12, 1 << 12][..], &[3], &[1 << 62, 0], &[1 << 62, 1 << 62]] {
        let tensor = TensorValues { shape, ..tensor };
        let planned = Engine::plan::<TensorError>(&cpu, PRESET, &[tensor], &NoInputs, None);
        let error = planned.unwrap_err().to_string();
        assert!(error.contains("524288 bytes of values do not match shape"), "{error}");
    }
    // Empty, however large its other dimensions are.
    let empty = TensorValues::new(DTYPE, &[1 << 62, 0], &[][..]);
    assert_eq!(encode(&cpu, &Jobs::new(&[empty], &plans)).unwrap().len(), 0);
    // SAFETY: it is not used.
    let memory = unsafe { DeviceMemory::new(0, 0, 1 << 19, 0) };
    let there = wrong(TensorValues { values: memory.into(), ..tensor }, &plans);
    assert!(there.contains("in device memory"), "{there}");
}
