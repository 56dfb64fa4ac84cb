//! One member of `ripstop bench allreduce`: contributes its leaves, takes the sum, and checks the last one to the bit.

use std::borrow::Cow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use ripstop::{Session, Settings, State, TensorSpec, VirtualRank, VirtualRanks};
use types::{DType, TreeNode};

use super::{Measured, cpu_seconds, write_measured};

/// One member of the bench, under `ripstop run`.
#[derive(Debug, Args)]
pub(crate) struct MemberArgs {
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    rounds: u64,
    #[arg(long)]
    warm_up: u64,
    #[arg(long)]
    folder: PathBuf,
}

pub(crate) fn run(args: &MemberArgs) -> anyhow::Result<ExitCode> {
    let rank = std::env::var("LOCAL_RANK")
        .context("LOCAL_RANK is not set: `ripstop bench allreduce` starts this")?;
    let measured = crate::block_on(measure(args))??;
    write_measured(&args.folder.join(format!("member-{rank}.json")), &measured)?;
    Ok(ExitCode::SUCCESS)
}

async fn measure(args: &MemberArgs) -> anyhow::Result<Measured> {
    let steps = args.warm_up + args.rounds;
    let settings = Settings::from_env()?.total_steps(steps);
    let v = settings.virtual_rank_count();
    let elements = usize::try_from(args.bytes / 4)?;
    let mut state = Counter { steps: 0, elements };
    let mut leaves: Vec<(VirtualRank, Vec<f32>)> = Vec::new();
    let mut sum = vec![0.0_f32; elements];
    let mut session = Session::join(settings).await?;
    let mut measured = Measured { times_ms: Vec::new(), sent_bytes: 0, cpu_s: 0.0 };
    let mut before = (0.0, 0);
    let mut round = 0;
    loop {
        if round == args.warm_up {
            before = (cpu_seconds(), session.sent_wire_bytes());
        }
        let began = Instant::now();
        let Some(mut step) = session.next_step(&mut state).await? else { break };
        while let Some(rank) = step.next_virtual_rank().await? {
            let at = match leaves.iter().position(|(known, _)| *known == rank) {
                Some(at) => at,
                None => {
                    leaves.push((rank, (0..elements).map(|i| element(rank, i)).collect()));
                    leaves.len() - 1
                }
            };
            step.contribute(rank, &leaves[at].1).await?;
        }
        step.finish_into(&mut sum).await?;
        if round >= args.warm_up {
            measured.times_ms.push(began.elapsed().as_secs_f64() * 1e3);
        }
        round += 1;
        state.steps += 1;
        if round == steps {
            measured.cpu_s = cpu_seconds() - before.0;
            measured.sent_bytes = session.sent_wire_bytes() - before.1;
        }
    }
    if round != steps {
        bail!("the job ended after {round} of {steps} rounds");
    }
    check(v, &sum)?;
    Ok(measured)
}

/// Every element must have the bits that the definition gives: left + right at each node of the tree, divided once.
fn check(v: VirtualRanks, sum: &[f32]) -> anyhow::Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "as the definition has it")]
    let weight = v.count() as f32;
    for (i, actual) in sum.iter().enumerate() {
        let expected = node(v, v.root(), i) / weight;
        if actual.to_bits() != expected.to_bits() {
            bail!("element {i} of the sum is {actual:?}, not {expected:?}: this is a bug");
        }
    }
    Ok(())
}

fn node(v: VirtualRanks, name: TreeNode, i: usize) -> f32 {
    match name.children() {
        None => element(VirtualRank(name.start()), i),
        Some((left, right)) if right.is_outside(v) => node(v, left, i),
        Some((left, right)) => node(v, left, i) + node(v, right, i),
    }
}

/// An element of a leaf: numbers of both signs whose sums round.
fn element(rank: VirtualRank, i: usize) -> f32 {
    let mixed = (i as u32 ^ rank.0.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    // The upper bits, as a number from -1 to 1.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_wrap,
        reason = "rounding is wanted"
    )]
    let number = (mixed as i32) as f32 / 2_147_483_648.0;
    number
}

/// A state that costs nothing, so that the sum is what is measured.
struct Counter {
    steps: u64,
    elements: usize,
}

impl State for Counter {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec { name: "steps".to_owned(), dtype: DType::U8, shape: vec![8] }]
    }

    fn tensor(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        (name == "steps").then(|| Cow::Owned(self.steps.to_le_bytes().to_vec()))
    }

    fn load(&mut self, _name: &str, offset: usize, bytes: &[u8]) {
        let mut all = self.steps.to_le_bytes();
        all[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.steps = u64::from_le_bytes(all);
    }

    fn gradient_elements(&self) -> usize {
        self.elements
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_with_one_wrong_bit_is_refused() {
        let v = VirtualRanks::new(5).unwrap();
        let mut sum: Vec<f32> = (0..100).map(|i| node(v, v.root(), i) / 5.0).collect();
        check(v, &sum).unwrap();
        sum[42] = f32::from_bits(sum[42].to_bits() ^ 1);
        assert!(check(v, &sum).unwrap_err().to_string().contains("element 42"));
    }
}
