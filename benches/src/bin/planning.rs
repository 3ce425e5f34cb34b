//! The time to plan a tensor, beside the time to encode it.
//!
//! `planning --data DIR [--kib N,N,...] [--preset NAME]`: takes the weights, first and second moments of each pair of
//! `NAME_s0.safetensors` and `NAME_s1.safetensors`, and makes a tensor of N KiB of each (512, 1,024 and 16,384 by
//! default). One thread, preset `balanced` by default; as a base, as a delta, and as a delta whose plan was chosen
//! before ("again"). Also as a base and as a delta for which the plan of a similar tensor is tried and holds ("alike").

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use s4_benches::states::{Outcome, State};
use s4_engine::{
    Choice, CpuEngine, EncodeJob, MomentSample, ParentSample, PlanJob, Preset, Scratch, TensorPlan,
    TensorView, expected_of, parent_probes,
};
use s4_format::{DType, Digest};
use s4_planes::Simd;
use s4weights::Values;

/// Calls of each measurement; the fastest counts.
const CALLS: usize = 50;
/// Values in a row.
const COLUMNS: usize = 1024;
/// Kinds of tensors, by the prefix of their names. Moments come before the weights, whose contexts depend on them.
const KINDS: [(&str, &str); 3] = [
    ("optimizer.exp_avg.", "first moments"),
    ("optimizer.exp_avg_sq.", "second moments"),
    ("model.", "weights"),
];

fn main() -> Outcome<()> {
    const USAGE: &str = "usage: planning --data DIR [--kib N,N,...] [--preset NAME]";
    let (mut data, mut sizes, mut preset) = (None, vec![512, 1024, 16384], Preset::Balanced);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), arguments.next()) {
            ("--data", Some(dir)) => data = Some(PathBuf::from(dir)),
            ("--kib", Some(list)) => {
                sizes = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            ("--preset", Some(name)) => preset = name.parse()?,
            _ => return Err(USAGE.into()),
        }
    }
    let data = data.ok_or(USAGE)?;
    println!("preset `{}`, milliseconds a tensor, one thread: planned + encoded", preset.name());
    let columns = ["base", "delta", "delta again", "base, alike", "delta, alike"];
    println!("{:42} {}", "", columns.map(|column| format!("{column:>18}")).join(" "));
    for entry in std::fs::read_dir(&data)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let Some(name) = stem.strip_suffix("_s0") else { continue };
        let next = data.join(format!("{name}_s1.safetensors"));
        for kib in &sizes {
            measure(preset, name, (&path, &next), kib << 10)?;
        }
    }
    Ok(())
}

/// The dtype of the tensors with a prefix, and their values, repeated to fill `bytes` bytes but no part of a row.
fn tensor_of(state: &State, prefix: &str, bytes: usize) -> Outcome<(DType, Vec<u8>)> {
    let mut dtype = None;
    let mut values = vec![];
    for source in state.sources() {
        let Values::Host(data) = source.values else { continue };
        if source.name.starts_with(prefix) && source.shape.len() > 1 {
            dtype = Some(source.dtype);
            values.extend_from_slice(data);
        }
    }
    let dtype = dtype.ok_or_else(|| format!("no tensors `{prefix}*`"))?;
    let rows = bytes / (dtype.size() * COLUMNS);
    Ok((dtype, values.into_iter().cycle().take(rows * dtype.size() * COLUMNS).collect()))
}

fn measure(
    preset: Preset,
    name: &str,
    (before, after): (&Path, &Path),
    bytes: usize,
) -> Outcome<()> {
    let (before, after) = (State::read(before)?, State::read(after)?);
    let engine = CpuEngine::new(Simd::detect());
    let mut moments = vec![];
    for (prefix, kind) in KINDS {
        let (dtype, parent) = tensor_of(&before, prefix, bytes)?;
        let (_, values) = tensor_of(&after, prefix, bytes)?;
        let shape = [(bytes / dtype.size() / COLUMNS) as u64, COLUMNS as u64];
        let view = TensorView { dtype, shape: &shape, data: &values };
        let probed = |data: &[u8]| probed(dtype, data);
        let given = moments.iter().map(|(dtype, data): &(_, Vec<u8>)| (*dtype, probed(data)));
        let samples: Vec<_> = given.filter(|_| kind == "weights").collect();
        let moments_of = (0..).zip(&samples);
        let moments_of: Vec<_> = moments_of
            .map(|(tensor, (dtype, values))| MomentSample { tensor, dtype: *dtype, values })
            .collect();
        let parents = probed(&parent);
        // What the parent's own rows and columns predict, if it is stored with them.
        let before = TensorView { dtype, shape: &shape, data: &parent };
        let before = engine.plan(&PlanJob::new(preset, &before), &mut Scratch::default())?;
        let expected = expected_of(&before.plan, (dtype, &shape, &before.side), None)?;
        let sample = ParentSample {
            manifest: Digest([1; 32]),
            tensor: 0,
            values: &parents,
            moments: &moments_of,
            expected: expected.as_ref(),
        };
        let inputs = [&parent[..]].into_iter().chain(moments.iter().map(|(_, data)| &data[..]));
        let inputs: Vec<_> = inputs.collect();
        let base = PlanJob::new(preset, &view);
        let delta = PlanJob { parent: Some(&sample), ..base };
        print!("{:42}", format!("{name}, {} KiB, {kind}", bytes >> 10));
        let show = |job| {
            let (plan, encode, choice) = times(&engine, &job, &inputs)?;
            print!(" {:>18}", format!("{:.3} + {:.3}", plan * 1e3, encode * 1e3));
            Outcome::Ok(choice)
        };
        let of_base = show(base)?;
        let of_delta = show(delta)?;
        show(PlanJob { choice: of_delta, ..delta })?;
        let [of_base, of_delta] = [of_base, of_delta].map(|c| c.map(Choice::for_one_alike));
        show(PlanJob { choice: of_base, ..base })?;
        show(PlanJob { choice: of_delta, ..delta })?;
        println!();
        moments.push((dtype, values));
    }
    Ok(())
}

/// The values of a tensor that the planner samples.
fn probed(dtype: DType, data: &[u8]) -> Vec<u8> {
    let width = dtype.value_width();
    let runs = parent_probes(dtype, (data.len() / width) as u64);
    let bytes = |run: &std::ops::Range<u64>| run.start as usize * width..run.end as usize * width;
    runs.iter().flat_map(|run| &data[bytes(run)]).copied().collect()
}

/// Seconds to plan and to encode a tensor, and the planner's choice.
fn times(
    engine: &CpuEngine,
    job: &PlanJob<'_>,
    inputs: &[&[u8]],
) -> Outcome<(f64, f64, Option<Choice>)> {
    let mut scratch = Scratch::default();
    let (mut planned, mut encoded) = (f64::INFINITY, f64::INFINITY);
    let mut choice = None;
    for _ in 0..CALLS {
        let started = Instant::now();
        let plan = engine.plan(black_box(job), &mut scratch)?;
        planned = planned.min(started.elapsed().as_secs_f64());
        let started = Instant::now();
        encode(engine, (job, &plan), inputs, &mut scratch)?;
        encoded = encoded.min(started.elapsed().as_secs_f64());
        choice = plan.choice;
    }
    Ok((planned, encoded, choice))
}

/// Encodes all chunks of a tensor.
fn encode(
    engine: &CpuEngine,
    (job, plan): (&PlanJob<'_>, &TensorPlan),
    inputs: &[&[u8]],
    scratch: &mut Scratch,
) -> Outcome<()> {
    let width = job.view.dtype.value_width();
    let mut frame = Vec::with_capacity(job.view.data.len());
    for chunk in 0..job.view.data.len().div_ceil(width << plan.chunk_log2) {
        let start = chunk * (width << plan.chunk_log2);
        let end = job.view.data.len().min(start + (width << plan.chunk_log2));
        let wanted = plan.plan.inputs.len();
        let inputs: Vec<_> = inputs[..wanted].iter().map(|input| &input[start..end]).collect();
        let job = EncodeJob { view: job.view, plan, chunk: chunk as u64, inputs: &inputs };
        black_box(engine.encode(&job, scratch, &mut frame)?);
    }
    Ok(())
}
