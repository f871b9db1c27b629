//! What `serve` says on a terminal: what is served, how a virtual machine gets it, how it is
//! stopped.
//!
//! Promises: a command that is printed can be copied into a shell, whatever the paths in it.
//! Printed once, when the disks answer.

use ringdisk_daemon::terminal::{bold, say, shell_word};

use super::Running;

/// Says it.
pub(super) fn greet(running: &[Running]) {
    let with_path: Vec<ReadyDisk<'_>> = running
        .iter()
        .filter_map(|disk| {
            let path = disk.path.as_deref()?.to_str()?;
            Some(ReadyDisk { path, connects: disk.front.is_some(), queues: disk.queues })
        })
        .collect();
    for disk in running {
        say(bold(&disk.ready));
    }
    if let Some(first) = with_path.first() {
        say(format_args!("  QEMU (size: as -m): {}", qemu(&with_path)));
        let word = shell_word(first.path);
        say(format_args!("  stop: Ctrl-C here, or `ringdisk ctl {word} stop` anywhere"));
    } else {
        say("  stop: Ctrl-C here");
    }
}

/// A served disk that a virtual machine can connect to.
struct ReadyDisk<'a> {
    path: &'a str,
    /// To a socket that it makes itself.
    connects: bool,
    queues: u16,
}

/// Options that connect QEMU to the disks.
fn qemu(disks: &[ReadyDisk<'_>]) -> String {
    let mut line =
        String::from("-object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem");
    for (number, ReadyDisk { path, connects, queues }) in disks.iter().enumerate() {
        // A comma would end the value.
        let path = path.replace(',', ",,");
        // QEMU has to come back when this process was killed and another one serves (before QEMU
        // 9.2: reconnect=1).
        let server = if *connects { ",server=on,wait=off" } else { ",reconnect-ms=100" };
        let chardev = format!("socket,id=disk{number},path={path}{server}");
        line.push_str(&format!(
            " -chardev {} -device vhost-user-blk-pci,chardev=disk{number},num-queues={queues}",
            shell_word(&chardev)
        ));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_can_be_copied_whatever_the_path() {
        let disks = [
            ReadyDisk { path: "/run/vm.sock", connects: false, queues: 4 },
            ReadyDisk { path: "/run/a, b", connects: true, queues: 1 },
        ];
        assert_eq!(
            qemu(&disks),
            "-object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem \
             -chardev socket,id=disk0,path=/run/vm.sock,reconnect-ms=100 -device \
             vhost-user-blk-pci,chardev=disk0,num-queues=4 \
             -chardev 'socket,id=disk1,path=/run/a,, b,server=on,wait=off' -device \
             vhost-user-blk-pci,chardev=disk1,num-queues=1"
        );
    }
}
