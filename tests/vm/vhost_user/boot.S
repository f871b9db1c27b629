/* A boot sector that loads Linux from the disk it stands on, with nothing but the calls of a PC's firmware (INT 13h to read, INT 15h to
 * copy above 1 MiB). bootdisk.py writes the list of what is read where to `segments`. Says "ringdisk boots" on the first serial port.
 *
 * as --32 boot.S -o boot.o && ld -m elf_i386 -Ttext 0x7c00 --oformat binary boot.o -o boot.bin */
.code16
.globl _start
_start:
        cli
        xorw %ax, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movw $0x7c00, %sp
        cld
        sti
        movb %dl, drive
        movw $hello, %si
        call print
        movw $segments, %bp
segment:
        movl 4(%bp), %ebx               /* sectors that remain */
        testl %ebx, %ebx
        jz start_linux
        movl 0(%bp), %eax
        movl %eax, packet_lba
        movl 8(%bp), %edi               /* where they belong */
piece:
        movl $64, %ecx
        cmpl %ecx, %ebx
        jae 1f
        movl %ebx, %ecx
1:      movw %cx, packet_count
        movw $packet, %si
        movb drive, %dl
        movb $0x42, %ah
        pushal
        int $0x13
        popal
        jc failed
        movl %edi, %eax                 /* base address of the destination, in its descriptor's three places */
        movw %ax, to_low
        shrl $16, %eax
        movb %al, to_middle
        movb %ah, to_high
        pushal
        shlw $8, %cx                    /* words */
        movw $table, %si
        movb $0x87, %ah
        int $0x15
        popal
        jc failed
        addl %ecx, packet_lba
        subl %ecx, %ebx
        shll $9, %ecx
        addl %ecx, %edi
        testl %ebx, %ebx
        jnz piece
        addw $12, %bp
        jmp segment

start_linux:                            /* the boot protocol's way into the setup code at 0x90000 */
        cli
        movw $0x9000, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %fs
        movw %ax, %gs
        movw %ax, %ss
        movw $0xe000, %sp
        ljmp $0x9020, $0

failed: movw $sorry, %si
        call print
1:      hlt
        jmp 1b

print:  lodsb
        testb %al, %al
        jz 2f
        movb %al, %ah
        movw $0x3fd, %dx
1:      inb %dx, %al
        testb $0x20, %al
        jz 1b
        movb %ah, %al
        movw $0x3f8, %dx
        outb %al, %dx
        jmp print
2:      ret

hello:  .asciz "ringdisk boots\r\n"
sorry:  .asciz "ringdisk: the firmware could not read\r\n"
drive:  .byte 0
        .balign 4
packet: .byte 16, 0
packet_count: .word 0
        .word 0, 0x1000                 /* to 0x10000 */
packet_lba: .long 0, 0
table:  .fill 16, 1, 0
        .word 0xffff, 0x0000
        .byte 0x01, 0x93, 0, 0          /* from 0x10000 */
        .word 0xffff
to_low: .word 0
to_middle: .byte 0, 0x93, 0
to_high: .byte 0
        .fill 16, 1, 0
        .org 380
segments:                               /* first sector, sectors, address; ends with no sectors */
        .fill 60, 1, 0
        .org 440
