//! The command line.

use std::path::PathBuf;
use std::time::Duration;

const USAGE: &str = "load SOCKET [--queues N] [--depth N[,N…]] [--block BYTES] [--op read|write] \
[--order random|sequential] [--size BYTES] [--seconds S] [--wait poll|call] [--indirect] [--each] \
[--hold S]";

/// What a thread does while nothing has come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It looks all the time, and lets others run now and then.
    Poll,
    /// It sleeps until it is called.
    Call,
}

#[derive(Clone, Debug)]
pub(crate) struct Arguments {
    pub(crate) socket: PathBuf,
    pub(crate) queues: u16,
    /// Requests in flight of each queue; when there are fewer numbers than queues they are used in
    /// turn.
    depths: Vec<u16>,
    /// Bytes of a request.
    pub(crate) block: u32,
    pub(crate) write: bool,
    pub(crate) random: bool,
    /// Bytes of the disk that are used.
    pub(crate) size: u64,
    pub(crate) time: Duration,
    pub(crate) wait: Wait,
    pub(crate) indirect: bool,
    /// A line for each queue, with its latencies.
    pub(crate) each: bool,
    /// Seconds that the connection stays afterwards.
    pub(crate) hold_s: u64,
}

impl Arguments {
    /// Errors: what is wrong, and what there is.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
        let mut out = Arguments {
            socket: PathBuf::new(),
            queues: 1,
            depths: vec![1],
            block: 4096,
            write: false,
            random: true,
            size: 1 << 30,
            time: Duration::from_secs(1),
            wait: Wait::Call,
            indirect: false,
            each: false,
            hold_s: 0,
        };
        while let Some(word) = words.next() {
            if word == "--indirect" {
                out.indirect = true;
                continue;
            }
            if word == "--each" {
                out.each = true;
                continue;
            }
            if !word.starts_with("--") {
                out.socket = word.into();
                continue;
            }
            let value = words.next().ok_or_else(|| format!("{word} needs a value\n{USAGE}"))?;
            let wrong = || format!("{word} {value}?\n{USAGE}");
            let number = || value.parse::<u64>().map_err(|_| wrong());
            match word.as_str() {
                "--queues" => out.queues = u16::try_from(number()?).map_err(|_| wrong())?,
                "--depth" => {
                    let depths: Result<_, _> = value.split(',').map(str::parse).collect();
                    out.depths = depths.map_err(|_| wrong())?;
                }
                "--block" => out.block = u32::try_from(number()?).map_err(|_| wrong())?,
                "--size" => out.size = number()?,
                "--hold" => out.hold_s = number()?,
                "--seconds" => {
                    out.time = value
                        .parse()
                        .ok()
                        .and_then(|s| Duration::try_from_secs_f64(s).ok())
                        .ok_or_else(wrong)?;
                }
                "--op" => out.write = pick(&value, ["read", "write"]).ok_or_else(wrong)?,
                "--order" => {
                    out.random = !pick(&value, ["random", "sequential"]).ok_or_else(wrong)?;
                }
                "--wait" => {
                    let call = pick(&value, ["poll", "call"]).ok_or_else(wrong)?;
                    out.wait = if call { Wait::Call } else { Wait::Poll };
                }
                _ => return Err(wrong()),
            }
        }
        let fits = out.block > 0 && out.block.is_multiple_of(512) && out.blocks() > 0;
        let is_deep = !out.depths.is_empty() && out.depths.iter().all(|depth| *depth > 0);
        if out.socket.as_os_str().is_empty() || out.queues == 0 || !is_deep || !fits {
            return Err(USAGE.into());
        }
        Ok(out)
    }

    /// Blocks of the disk for each queue.
    pub(crate) fn blocks(&self) -> u64 {
        self.size / u64::from(self.block) / u64::from(self.queues.max(1))
    }

    /// Requests in flight of a queue.
    pub(crate) fn depth(&self, index: u16) -> u16 {
        self.depths[usize::from(index) % self.depths.len()]
    }

    /// Descriptors of a queue: enough for its depth.
    pub(crate) fn queue_size(&self, index: u16) -> u16 {
        let each = if self.indirect { 1 } else { 3 };
        (each * self.depth(index)).next_power_of_two().max(16)
    }
}

/// Whether it is the second of two.
fn pick(value: &str, of: [&str; 2]) -> Option<bool> {
    of.iter().position(|each| *each == value).map(|at| at == 1)
}
