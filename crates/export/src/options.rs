//! What every export can be asked for: its name, its queue threads, their CPUs, whether nodes
//! matter, and what clients and rings may do.
//!
//! Promises: plain values; control path.

use std::fmt;
use std::str::FromStr;

use ringdisk_ring::CpuList;

/// Most queue threads of an export.
pub const THREADS_MAX: usize = 64;

/// How many queue threads serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// As many as suit the machine and the protocol.
    #[default]
    Auto,
    /// This many, 1..=[`THREADS_MAX`].
    Count(usize),
}

/// As users write it: `auto`, or a number from 1 to [`THREADS_MAX`].
impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Threads, String> {
        if text == "auto" {
            return Ok(Threads::Auto);
        }
        match text.parse() {
            Ok(count) if (1..=THREADS_MAX).contains(&count) => Ok(Threads::Count(count)),
            _ => Err(format!("write auto, or a number from 1 to {THREADS_MAX}")),
        }
    }
}

/// As [`Threads::from_str`] reads it.
impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Threads::Auto => f.write_str("auto"),
            Threads::Count(count) => write!(f, "{count}"),
        }
    }
}

/// Whether NUMA nodes matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// Threads are spread over the nodes, and memory is on the node of its thread.
    #[default]
    Auto,
    /// Nodes are not looked at; memory comes from where the system takes it.
    Off,
}

/// Options of the queue threads, the same for every export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadOptions {
    /// How many there are.
    pub threads: Threads,
    /// CPUs for them; `None`: all that this process may use.
    pub cpus: Option<CpuList>,
    /// Whether nodes matter.
    pub numa: Numa,
}

impl ThreadOptions {
    /// So many threads, on the CPUs of this process.
    #[must_use]
    pub fn count_of(threads: usize) -> ThreadOptions {
        ThreadOptions { threads: Threads::Count(threads), ..ThreadOptions::default() }
    }

    /// The number of queue threads, at least one.
    ///
    /// * `auto`: what [`Threads::Auto`] stands for.
    /// * `most`: threads that can have work.
    /// * `why_most`: why there are no more, for the warning.
    pub(crate) fn count(
        &self,
        auto: usize,
        most: usize,
        why_most: &str,
        warnings: &mut Vec<String>,
    ) -> usize {
        match self.threads {
            Threads::Auto => auto.clamp(1, most),
            Threads::Count(count) if count > most => {
                warnings.push(format!("{most} queue threads instead of {count}: {why_most}"));
                most
            }
            Threads::Count(count) => count.max(1),
        }
    }
}

/// Options of an export, the same whatever its protocol.
#[derive(Clone, Debug)]
pub struct CommonOptions {
    /// What it is called in messages, in statistics and in the names of its threads.
    pub name: String,
    /// Its queue threads.
    pub threads: ThreadOptions,
    /// Refuse writes although the disk would take them.
    pub read_only: bool,
    /// Rings do nothing but what serving takes ([`ringdisk_ring::Config::restricted`]).
    pub restricted: bool,
}

impl Default for CommonOptions {
    fn default() -> CommonOptions {
        CommonOptions {
            name: String::from("ringdisk"),
            threads: ThreadOptions::default(),
            read_only: false,
            restricted: true,
        }
    }
}

impl CommonOptions {
    /// Defaults, with so many queue threads.
    #[must_use]
    pub fn with_threads(threads: usize) -> CommonOptions {
        CommonOptions { threads: ThreadOptions::count_of(threads), ..CommonOptions::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_a_number_in_their_limits_or_auto() {
        assert_eq!(("auto".parse(), "64".parse()), (Ok(Threads::Auto), Ok(Threads::Count(64))));
        for text in ["", "0", "65", "-1", "many", "1.5"] {
            let refused = text.parse::<Threads>().expect_err(text);
            assert_eq!(refused, "write auto, or a number from 1 to 64");
        }
        assert_eq!(
            (Threads::Auto.to_string(), Threads::Count(3).to_string().as_str()),
            ("auto".into(), "3")
        );
    }

    #[test]
    fn more_threads_than_can_have_work_are_a_warning() {
        let asked = |threads| ThreadOptions { threads, ..ThreadOptions::default() };
        let mut warnings = Vec::new();
        let mut count = |threads| asked(threads).count(9, 4, "one for each", &mut warnings);
        assert_eq!((count(Threads::Auto), count(Threads::Count(3))), (4, 3));
        assert_eq!(count(Threads::Count(5)), 4);
        assert_eq!(warnings, ["4 queue threads instead of 5: one for each"]);
    }
}
