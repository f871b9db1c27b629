//! Runs inputs that are there, without libFuzzer: `replay LIMIT_S TARGET FILE…`
//!
//! Promises: names each input before it runs; ends badly at the first one that panics (in any
//! thread), takes longer than LIMIT_S seconds, or makes the process larger than 4 GiB.

use std::process::{abort, exit};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ringdisk_fuzz::targets;

const MEMORY_BYTES_MAX: u64 = 4 << 30;
const PAGE_BYTES: u64 = 4096;
/// How often the limits are looked at.
const INTERVAL: Duration = Duration::from_millis(200);

/// When the input that runs was begun.
static BEGUN: Mutex<Option<Instant>> = Mutex::new(None);

/// Ends the process when an input exceeds a limit. On a thread of its own.
fn watch(limit: Duration) -> ! {
    loop {
        std::thread::sleep(INTERVAL);
        let begun = *BEGUN.lock().expect("nothing panics with it");
        if begun.is_some_and(|begun| begun.elapsed() > limit) {
            eprintln!("the last input takes longer than {limit:?}");
            abort();
        }
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        if pages.is_none_or(|pages| pages * PAGE_BYTES > MEMORY_BYTES_MAX) {
            eprintln!("the process has more than {MEMORY_BYTES_MAX} bytes");
            abort();
        }
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [limit_s, target, files @ ..] = &words[..] else {
        eprintln!("replay LIMIT_S TARGET FILE…");
        exit(2);
    };
    let Some((_, run)) = targets::ALL.iter().find(|(name, _)| name == target) else {
        eprintln!("there is no target {target}");
        exit(2);
    };
    let limit = Duration::from_secs(limit_s.parse().expect("a number of seconds"));
    // A panic of any thread is a mistake that was found.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        abort();
    }));
    std::thread::spawn(move || watch(limit));
    for file in files {
        eprintln!("{file}");
        let input = std::fs::read(file).expect("an input");
        *BEGUN.lock().expect("nothing panics with it") = Some(Instant::now());
        run(&input);
    }
    println!("{} inputs", files.len());
}
