//! The CUDA engine against the ceilings of its machine and against nvCOMP, in one run of one program.
//!
//! `gpu [--data FOLDER] [--out FOLDER] [--mib N,N,...] [--tensors N] [--scratch MIB]
//! [--only preset|presets|kernels|path]`: values are weights of
//! `testdata`, repeated; kernels are timed by device events, whole paths by the clock. `gpu.json`, `gpu.md` and
//! `gpu.svg` are written to the folder of `--out`. nvCOMP is measured if its library is found
//! (`NVCOMP_LIBRARY` or the system's), and reported as missing otherwise.

mod lab;
mod ours;
mod path;
mod preset;
mod presets;
mod report;
mod theirs;

use std::path::{Path, PathBuf};

use s4_engine::cuda::CudaOptions;
use s4_format::DType;

use lab::{Lab, Outcome};
use report::Group;

const MIB: u64 = 1 << 20;

/// nvCOMP is measured at one size: the largest that is not above this, in MiB.
const MAX_PEER_MIB: u64 = 1024;

/// Budgets of scratch memory, in MiB, with which preset `nvcomp` is measured.
const SCRATCH: [u64; 3] = [256, 512, 1024];

/// Values of one dtype.
struct Tile {
    dtype: DType,
    name: &'static str,
    data: Vec<u8>,
}

/// Prefixes of the names of tensors.
const MODEL: &str = "model";
const MOMENTS: [&str; 2] = ["optimizer.exp_avg", "optimizer.exp_avg_sq"];

impl Tile {
    /// Weights or moments of two layers of `testdata`.
    fn of(folder: &Path, dtype: DType, name: &'static str, part: &str) -> Outcome<Self> {
        let (file, layers) = match dtype {
            DType::Float32 => ("gpt98m_fp32_s0", ["h.5.proj", "wte"]),
            _ => ("gpt34m_bf16_s0", ["h.4.fc", "wte"]),
        };
        let path = folder.join(file).with_extension("safetensors");
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let file = safetensors::SafeTensors::deserialize(&bytes)?;
        let mut data = vec![];
        for layer in layers {
            data.extend_from_slice(file.tensor(&format!("{part}.{layer}.weight"))?.data());
        }
        Ok(Self { dtype, name, data })
    }

    /// Weights and both moments, each repeated to fill about a third of `bytes` bytes.
    fn state(&self, folder: &Path, bytes: u64) -> Outcome<Self> {
        let times = usize::try_from(bytes)? / 3 / self.data.len();
        let mut data = self.data.repeat(times);
        for part in MOMENTS {
            data.extend(Self::of(folder, self.dtype, self.name, part)?.data.repeat(times));
        }
        Ok(Self { data, ..*self })
    }
}

struct Args {
    data: PathBuf,
    out: PathBuf,
    /// Size of each measurement, in MiB.
    mib: Vec<u64>,
    /// How many small tensors there are.
    tensors: u64,
    /// Device memory that engines may take, in MiB; by default as much as they do otherwise.
    scratch: Option<u64>,
    /// Measure one part alone: `preset` (preset `nvcomp`), `presets` (`fast` beside `balanced`), `kernels`, or `path`
    /// (from device memory to host memory).
    only: Option<String>,
}

impl Args {
    fn parse(mut args: impl Iterator<Item = String>) -> Outcome<Self> {
        let (data, folder) = ("testdata".into(), "benches/results".into());
        let mib = vec![64, 1024, 4096];
        let mut out = Self { data, out: folder, mib, tensors: 3000, scratch: None, only: None };
        while let Some(arg) = args.next() {
            let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
            match arg.as_str() {
                "--data" => out.data = value.into(),
                "--out" => out.out = value.into(),
                "--mib" => out.mib = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--tensors" => out.tensors = value.parse()?,
                "--scratch" => out.scratch = Some(value.parse()?),
                "--only" if ["preset", "presets", "kernels", "path"].contains(&&*value) => {
                    out.only = Some(value)
                }
                _ => return Err(format!("unknown argument {arg}").into()),
            }
        }
        Ok(out)
    }
}

fn main() -> Outcome<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    let tiles = [
        Tile::of(&args.data, DType::BFloat16, "bf16", MODEL)?,
        Tile::of(&args.data, DType::Float32, "fp32", MODEL)?,
    ];
    let mut options = CudaOptions::default();
    options.scratch = args.scratch.map_or(options.scratch, |mib| mib * MIB);
    let lab = Lab::new(options)?;
    let mut groups: Vec<Group> = vec![];
    for tile in &tiles {
        let of_peers = args.mib.iter().copied().filter(|m| *m <= MAX_PEER_MIB).max();
        let wants = |part| args.only.as_deref().is_none_or(|only| only == part);
        if let Some(mib) = of_peers.filter(|_| theirs::missing().is_none() && wants("preset")) {
            groups.push(preset::measure(&lab, tile, mib * MIB, &SCRATCH)?);
        }
        if let Some(mib) = of_peers.filter(|_| wants("presets")) {
            groups.extend(presets::measure(&lab, &args.data, tile, mib * MIB)?);
        }
        for mib in args.mib.iter().copied() {
            if wants("kernels") {
                groups.push(kernels(&lab, tile, mib * MIB, of_peers == Some(mib))?);
            }
            if wants("path") {
                groups.push(path::large(&lab, tile, mib * MIB)?);
            }
        }
        if !wants("path") {
            continue;
        }
        if let Some(mib) = of_peers {
            groups.push(path::state(&lab, &tile.state(&args.data, mib * MIB)?)?);
        }
        groups.push(path::small(&lab, tile, args.tensors)?);
    }
    let missing = theirs::missing();
    report::write(&args.out, &lab.machine(), missing.as_deref(), &groups)
}

/// Kernels alone: values and frames stay in device memory.
fn kernels(lab: &Lab, tile: &Tile, bytes: u64, peers: bool) -> Outcome<Group> {
    let values = lab.fill(&tile.data, bytes)?;
    let back = lab.alloc(bytes)?;
    let mut group = Group::new("kernels", tile.name, bytes, "device copy");
    let copy = lab.time(|| {
        // SAFETY: two buffers of `bytes` bytes, used by this stream alone.
        Ok(unsafe { lab.stream.copy_within_device(values.address(), back.address(), bytes) }?)
    })?;
    group.ceilings(copy, copy);
    ours::measure(lab, tile, &values, &back, &mut group)?;
    if peers {
        theirs::measure(lab, tile, &values, &back, &mut group)?;
    }
    eprintln!("{}", group.text());
    Ok(group)
}
