//! Saving a state to an S3 server in this process, compared with uploading its raw bytes through the
//! same client, in parts of the same size, with as many at once.
//!
//! `upload MIB [CALLS] [PRESET] [ENDPOINT]`: the size of the state, how often each is done (the fastest counts), the
//! preset (`balanced`, `fast` or `small`), and another server to use instead, with a bucket named `bucket` and the
//! keys `test`. CPU time is that of the whole process, the minimum over all calls. With few cores it is the limit, and
//! other load on the machine changes it less than the wall clock.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;
use s4_benches::adam::{State, sources};
use s4_benches::s3;
use s4weights::Preset;
use s4weights::store::{CheckpointStore, Place, SaveOptions, StorageOptions, StoreOptions};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let usage = "usage: upload MIB [CALLS] [PRESET] [ENDPOINT]";
    let mut arguments = std::env::args().skip(1);
    let mib: usize = arguments.next().ok_or(usage)?.parse()?;
    let calls: usize = arguments.next().map_or(Ok(3), |a| a.parse())?;
    let preset = arguments.next().map_or(Ok(Preset::default()), |a| a.parse())?;
    let endpoint = arguments.next();
    let server = s3::Server::start()?;
    let pairs = [
        ("endpoint_url", endpoint.unwrap_or_else(|| server.url())),
        ("key", "test".into()),
        ("secret", "test".into()),
        ("region", "us-east-1".into()),
    ];
    let storage: StorageOptions = pairs.map(|(k, v)| (k.to_owned(), v)).into();
    // Parents of deltas stay in memory, since the server does not keep their data.
    let options = StoreOptions { parent_memory: mib << 22, preset, ..StoreOptions::default() };
    let place = Place::open_url("s3://bucket/raw", &storage)?;
    let (client, prefix) = place.as_objects().ok_or("no bucket")?;
    let store = CheckpointStore::create("s3://bucket/store", &storage, options.clone())?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;

    let values = mib * (1 << 20) / 12;
    let shape = [values as u64];
    let mut state = State::new(values);
    (0..5).for_each(|step| state.step(step));
    let save = |bytes: &[Vec<u8>], step: u64, base: bool| -> Outcome<(Spent, f64)> {
        let sources = sources(bytes, &shape).into_iter().zip([0, 1, 1]);
        let sources: Vec<_> = sources.map(|(t, group)| t.in_group(group)).collect();
        let with = SaveOptions { base, ..Default::default() };
        let start = Start::now();
        let saved = store.save(step, &sources, &with)?;
        let spent = start.spent();
        if base != saved.checkpoint.base.is_none() {
            return Err(format!("a base: {:?}", saved.why_base).into());
        }
        Ok((spent, saved.report.bytes_in as f64 / saved.report.bytes_out as f64))
    };
    let [mut raw, mut base, mut delta] = [Spent::default(); 3];
    let mut ratios = [0.0; 2];
    for call in 0..calls as u64 {
        state.step(10 + 2 * call);
        let bytes = state.bytes();
        let parts: Vec<Bytes> = bytes
            .iter()
            .flat_map(|t| t.chunks(options.object_bytes))
            .map(Bytes::copy_from_slice)
            .collect();
        let at_once = options.requests.upload_memory / options.object_bytes;
        let start = Start::now();
        let puts = futures::stream::iter(parts.into_iter().enumerate()).map(|(n, part)| {
            let (client, key) = (client.clone(), prefix.clone().join(n.to_string()));
            async move { client.put(&key, part.into()).await }
        });
        runtime.block_on(puts.buffer_unordered(at_once).try_for_each(|_| async { Ok(()) }))?;
        raw = raw.min(start.spent());
        let (spent, ratio) = save(&bytes, 2 * call, true)?;
        (base, ratios[0]) = (base.min(spent), ratio);
        drop(bytes);
        state.step(11 + 2 * call);
        let (spent, ratio) = save(&state.bytes(), 2 * call + 1, false)?;
        (delta, ratios[1]) = (delta.min(spent), ratio);
        server.forget();
    }
    let line = |what: &str, spent: Spent, ratio: f64| {
        let Spent { wall, cpu } = spent;
        let speed = values as f64 * 12.0 / wall / 1e9;
        let (times, cpu_times) = (wall / raw.wall, cpu / raw.cpu);
        println!(
            "{what:6} {wall:8.3} s  {speed:6.2} GB/s  {times:5.2} of raw  \
             CPU {cpu:6.3} s  {cpu_times:5.2} of raw  ratio {ratio:.3}"
        );
    };
    println!("{mib} MiB, the fastest of {calls}");
    line("raw", raw, 1.0);
    line("base", base, ratios[0]);
    line("delta", delta, ratios[1]);
    Ok(())
}

/// Seconds.
#[derive(Clone, Copy)]
struct Spent {
    wall: f64,
    cpu: f64,
}

impl Default for Spent {
    fn default() -> Self {
        Self { wall: f64::INFINITY, cpu: f64::INFINITY }
    }
}

impl Spent {
    fn min(self, other: Self) -> Self {
        Self { wall: self.wall.min(other.wall), cpu: self.cpu.min(other.cpu) }
    }
}

struct Start {
    wall: Instant,
    cpu: Duration,
}

impl Start {
    fn now() -> Self {
        Self { wall: Instant::now(), cpu: cpu_time() }
    }

    fn spent(&self) -> Spent {
        let cpu = cpu_time().saturating_sub(self.cpu);
        Spent { wall: self.wall.elapsed().as_secs_f64(), cpu: cpu.as_secs_f64() }
    }
}

/// CPU time of the process up to now.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
